"""Counts of a node's adapters, for metrics and its load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """Adapters of a node, and requests that wait for them."""

    num_named: int = 0
    num_in_memory: int = 0
    num_in_use: int = 0  # of these
    num_reading: int = 0
    num_bytes: int = 0
    num_waiting_for_place: int = 0
    num_waiting_for_load: int = 0
    total_failed: int = 0
    total_evicted: int = 0
