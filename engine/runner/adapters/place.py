"""A place in the decoder that adapters change, and what they have for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

ROUTER = "router"


class Place(NamedTuple):
    """A linear layer of the decoder, which can stack several matrices of the files."""

    layer: int
    # qkv, output, gate_up, down; gates of recurrent layers; query_up, key and value of latent
    # attention; router, shared_gate_up, shared_down and shared_gate of a mixture of experts.
    name: str
    number: int | None = None  # of the expert or head, if each has a matrix


class PlaceSize(NamedTuple):
    """Largest size of what an adapter has for a place, or for one of its experts or heads."""

    num_parts: int
    rank: int


@dataclass(frozen=True, slots=True)
class Part:
    """A low-rank matrix of a place, which changes some neighbouring rows of its output."""

    down: Tensor  # [rank, columns]
    up: Tensor  # [rank, rows]
    first_row: int
