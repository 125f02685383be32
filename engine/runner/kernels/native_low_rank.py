"""Native products of adapters, in bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.runner.adapters.low_rank import Group
from baton.engine.runner.adapters.place import Part, Place
from baton.engine.runner.kernels.abi import LowRankPart
from baton.engine.runner.kernels.calls import Kernels, Workspace


class _Tokens(NamedTuple):
    """Tokens of the groups of a pass."""

    groups: Sequence[Group]
    indices: Tensor
    first: Tensor
    counts: Sequence[int]


class _Parts(NamedTuple):
    """Parts of all groups at one place."""

    array: object  # LowRankPart
    address: int
    first: Tensor
    ranks: Sequence[int]  # of each group, in sum


class NativeLowRankProducts:
    """Implements `LowRankProducts`. Of a pass, the kernels' arguments are made once."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._workspace = Workspace()
        self._tokens = _Tokens((), torch.empty(0), torch.empty(0), ())
        self._adapters: tuple[int, ...] = ()  # for which `_parts` were made
        self._parts: dict[Place, _Parts] = {}

    def prepare(self, part: Part, like: Tensor) -> Part:
        down, up = (matrix.to(like).contiguous() for matrix in (part.down, part.up))
        return Part(down, up, part.first_row)

    def add(self, place: Place, groups: Sequence[Group], inputs: Tensor, outputs: Tensor) -> None:
        if groups is not self._tokens.groups:
            self._begin(groups)
        if not groups:
            return
        parts, tokens = self._parts_at(place), self._tokens
        if not any(parts.ranks):
            return
        size = sum(rank * count for rank, count in zip(parts.ranks, tokens.counts, strict=True))
        [hidden_buf] = self._workspace.split(4 * size)
        self._kernels.call(
            "baton_add_low_rank",
            parts=parts.address,
            first_parts=parts.first,
            first_tokens=tokens.first,
            tokens=tokens.indices,
            src=inputs.contiguous(),
            dst=outputs,
            hidden_buf=hidden_buf,
            num_groups=len(groups),
            num_columns=inputs.shape[1],
            num_rows=outputs.shape[1],
        )

    def _begin(self, groups: Sequence[Group]) -> None:
        counts = [len(group.tokens) for group in groups]
        indices = torch.cat([group.tokens for group in groups]) if groups else torch.empty(0)
        first = torch.tensor([0, *accumulate(counts)])
        self._tokens = _Tokens(groups, indices, first, counts)
        adapters = tuple(id(group.adapter) for group in groups)
        if adapters != self._adapters:
            self._adapters, self._parts = adapters, {}

    def _parts_at(self, place: Place) -> _Parts:
        found = self._parts.get(place)
        if found is None:
            found = self._parts[place] = _make_parts(place, self._tokens.groups)
        return found


def _make_parts(place: Place, groups: Sequence[Group]) -> _Parts:
    of_groups = [group.adapter.parts.get(place, ()) for group in groups]
    parts = [
        LowRankPart(
            down=part.down.data_ptr(),
            up=part.up.data_ptr(),
            rank=len(part.down),
            first_row=part.first_row,
            num_rows=part.up.shape[1],
        )
        for of_group in of_groups
        for part in of_group
    ]
    array = (LowRankPart * len(parts))(*parts)
    return _Parts(
        array,
        ctypes.addressof(array),
        torch.tensor([0, *accumulate(map(len, of_groups))]),
        [sum(len(part.down) for part in of_group) for of_group in of_groups],
    )
