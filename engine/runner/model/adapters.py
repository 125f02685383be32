"""Values of adapters: places in the decoder, what an adapter has for them, tokens by adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor, isin

from baton.engine.runner.model.linear import Router
from baton.engine.runner.model.pass_layout import Ints

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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A loaded adapter."""

    parts: Mapping[Place, Sequence[Part]]
    # Of the layers whose router it changes, with its product merged into the weight.
    routers: Mapping[int, Router] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the memory of its matrices. Parts can share one."""
        matrices = {
            id(matrix): matrix
            for parts in self.parts.values()
            for part in parts
            for matrix in (part.down, part.up)
        }
        weights = [router.weight for router in self.routers.values()]
        return sum(matrix.nbytes for matrix in (*matrices.values(), *weights))


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Adapters of a pass."""

    adapters: Sequence[Adapter]
    indices: Ints  # by token: of its adapter, or -1

    def pad(self, num_tokens: int) -> Selection:
        """Return the selection with more tokens, which have no adapter."""
        added = np.full(num_tokens - len(self.indices), -1, dtype=np.int64)
        return Selection(self.adapters, np.concatenate((self.indices, added)))


NO_TOKENS = Selection((), np.zeros(0, dtype=np.int64))


class Group(NamedTuple):
    """Tokens of a pass with the same adapter."""

    adapter: Adapter
    tokens: Tensor  # int64, in the order of the flat batch


def restrict_groups(groups: Sequence[Group], tokens: Tensor) -> Sequence[Group]:
    """Return the groups of a pass over these tokens alone."""
    found = (Group(adapter, isin(tokens, its).nonzero()[:, 0]) for adapter, its in groups)
    return [group for group in found if len(group.tokens)]
