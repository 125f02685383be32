"""Native products of adapters, in bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.runner.adapters.low_rank import Adapter, Group, convert_parts
from baton.engine.runner.adapters.place import Part, Place
from baton.engine.runner.kernels.abi import (
    LowRankAdapter,
    LowRankGroups,
    LowRankPart,
    LowRankPlace,
    Struct,
)
from baton.engine.runner.kernels.calls import Kernels, Workspace

FUSED = ("qkv", "output", "gate_up", "down")  # places of a fused layer, in the kernel's order
_NOTHING = LowRankPlace()
_NOWHERE = ctypes.addressof(_NOTHING)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativeAdapter(Adapter):
    """An adapter with its structs, which are made once."""

    fused: int  # address of the places of all layers in the order of `FUSED`
    places: Mapping[Place, int]  # addresses
    ranks: Mapping[Place, int]  # in sum
    alive: object = field(repr=False)  # owner of the structs


def first_place(layer: int) -> int:
    """Return the index of a fused layer's first place."""
    return len(FUSED) * layer


class NativeLowRankProducts:
    """Implements `LowRankProducts`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._workspace = Workspace()
        self._tokens = GroupTokens(())

    def prepare(
        self, parts: Mapping[Place, Sequence[Part]], like: Tensor, num_layers: int
    ) -> Adapter:
        return _make_adapter(convert_parts(parts, like), num_layers)

    def add(self, place: Place, groups: Sequence[Group], inputs: Tensor, outputs: Tensor) -> None:
        if groups is not self._tokens.groups:
            self._tokens = GroupTokens(groups)
        adapters = [native_adapter(group) for group in groups]
        size = sum(
            adapter.ranks.get(place, 0) * len(group.tokens)
            for adapter, group in zip(adapters, groups, strict=True)
        )
        if not size:
            return
        [hidden_buf] = self._workspace.split(4 * size)
        addresses = [adapter.places.get(place, _NOWHERE) for adapter in adapters]
        structs = _adapter_array(addresses)
        self._kernels.call(
            "baton_add_low_rank",
            groups=self._tokens.struct(structs),
            src=inputs.contiguous(),
            dst=outputs,
            hidden_buf=hidden_buf,
            place=0,
            num_columns=inputs.shape[1],
            num_rows=outputs.shape[1],
        )


class GroupTokens:
    """Arrays of the tokens of groups."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        counts = [len(group.tokens) for group in groups]
        self._first = torch.tensor([0, *accumulate(counts)])
        self._tokens = torch.cat([group.tokens for group in groups]) if groups else self._first

    def struct(self, adapters: ctypes.Array[Struct]) -> Struct:
        """Return the struct for an array of LowRankAdapter. It does not keep the arrays alive."""
        address = ctypes.addressof(adapters)
        first, tokens = self._first.data_ptr(), self._tokens.data_ptr()
        return LowRankGroups(address, first, tokens, len(self.groups))


class FusedLowRank:
    """Arguments of fused layers in a pass with adapters."""

    def __init__(self, groups: Sequence[Group]) -> None:
        adapters = [native_adapter(group) for group in groups]
        tokens = GroupTokens(groups)
        structs = _adapter_array([adapter.fused for adapter in adapters])
        size = sum(
            max(adapter.ranks.values(), default=0) * len(group.tokens)
            for adapter, group in zip(adapters, groups, strict=True)
        )
        buffer = torch.empty(size)
        self.groups = tokens.struct(structs)
        self.hidden_buf = buffer.data_ptr()
        self._alive = (groups, tokens, structs, buffer)


def native_adapter(group: Group) -> NativeAdapter:
    """Return the adapter of a group. Raises TypeError for one of other products."""
    if not isinstance(group.adapter, NativeAdapter):
        raise TypeError(f"native kernels need adapters of their own, not {group.adapter!r}")
    return group.adapter


def _adapter_array(addresses: Sequence[int]) -> ctypes.Array[Struct]:
    return (LowRankAdapter * len(addresses))(*map(LowRankAdapter, addresses))


def _make_adapter(parts: Mapping[Place, Sequence[Part]], num_layers: int) -> NativeAdapter:
    arrays = {place: _part_array(its) for place, its in parts.items()}
    own = {
        place: LowRankPlace(ctypes.addressof(array), len(parts[place]))
        for place, array in arrays.items()
    }
    fused = (LowRankPlace * first_place(num_layers))()
    for place, struct in own.items():
        if place.name in FUSED and place.number is None:
            fused[first_place(place.layer) + FUSED.index(place.name)] = struct
    return NativeAdapter(
        parts,
        fused=ctypes.addressof(fused),
        places={place: ctypes.addressof(struct) for place, struct in own.items()},
        ranks={place: sum(len(part.down) for part in its) for place, its in parts.items()},
        alive=(arrays, own, fused),
    )


def _part_array(parts: Sequence[Part]) -> ctypes.Array[Struct]:
    return (LowRankPart * len(parts))(
        *(
            LowRankPart(
                down=part.down.data_ptr(),
                up=part.up.data_ptr(),
                rank=len(part.down),
                first_row=part.first_row,
                num_rows=part.up.shape[1],
            )
            for part in parts
        )
    )
