"""A place in the decoder that adapters change, and what they have for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """A linear layer of the decoder, which can stack several matrices of the files."""

    layer: int
    name: str  # qkv, output, gate_up or down


@dataclass(frozen=True, slots=True)
class Part:
    """A low-rank matrix of a place, which changes some neighbouring rows of its output."""

    down: Tensor  # [rank, columns]
    up: Tensor  # [rank, rows]
    first_row: int
