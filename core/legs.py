"""Legs: the parts of a request that one node each serves."""

from __future__ import annotations

from enum import StrEnum


class LegKind(StrEnum):
    ENCODE = "encode"  # turns a text into a vector, or a picture into KV blocks with its encoding
    PREFILL = "prefill"  # computes a prompt, and sends its KV and the first token
    DECODE = "decode"  # generates the answer from KV that it receives, or from the prompt


Legs = tuple[LegKind, ...]
GENERATING: Legs = (LegKind.PREFILL, LegKind.DECODE)
MAX_DRAIN_S = 86_400.0  # for legs that a node no longer offers


def role_of(legs: Legs) -> str:
    """Return the role of a node that offers these legs. Any node may encode beside others."""
    return "+".join([kind for kind in legs if kind in GENERATING] or legs) or "idle"
