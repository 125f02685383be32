"""Native products of adapters, in bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.runner.adapters.low_rank import ExpertPass, LowRankProducts, convert_parts
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.abi import (
    LowRankAdapter,
    LowRankGroups,
    LowRankPart,
    LowRankPlace,
    Struct,
)
from baton.engine.runner.kernels.calls import Kernels, Workspace
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.kernels.native_experts import AddedProducts
from baton.engine.runner.model.adapters import Adapter, Group, Part, Place

FUSED = ("qkv", "output", "gate_up", "down")  # places of a fused layer, in the kernel's order


class Places(NamedTuple):
    """Array of LowRankPlace."""

    address: int
    num_places: int


class NumberedPlaces(NamedTuple):
    """Places of the experts or heads of a layer."""

    places: Places
    max_rank: int  # in sum


NO_PLACES = Places(0, 0)
ALIGNMENT = 64  # of a matrix, in bytes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativeAdapter(Adapter):
    """An adapter with its structs, which are made once."""

    fused: Places  # of all layers in the order of `FUSED`
    places: Mapping[Place, Places]
    numbered: Mapping[Place, NumberedPlaces]  # by their place without a number
    ranks: Mapping[Place, int]  # in sum
    alive: object = field(repr=False)  # owner of the structs


def first_place(layer: int) -> int:
    """Return the index of a fused layer's first place."""
    return len(FUSED) * layer


class NativeLowRankProducts(LowRankProducts):
    """Products with kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._workspace = Workspace()
        self._tokens = GroupTokens(())

    def prepare(
        self, parts: Mapping[Place, Sequence[Part]], like: Tensor, num_layers: int
    ) -> Adapter:
        return _make_adapter(_join(convert_parts(parts, like)), num_layers)

    def add(self, place: Place, groups: Sequence[Group], inputs: Tensor, outputs: Tensor) -> None:
        adapters = self._use(groups)
        size = sum(
            adapter.ranks.get(place, 0) * len(group.tokens)
            for adapter, group in zip(adapters, groups, strict=True)
        )
        if not size:
            return
        [hidden_buf] = self._workspace.split(4 * size)
        structs = _adapter_array([adapter.places.get(place, NO_PLACES) for adapter in adapters])
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

    def add_to_heads(
        self, layer: int, name: str, groups: Sequence[Group], inputs: Tensor, outputs: Tensor
    ) -> Tensor:
        numbered = [adapter.numbered.get(Place(layer, name)) for adapter in self._use(groups)]
        num_tokens, num_heads, num_columns = inputs.shape
        size = num_heads * _hidden_size(numbered, groups)
        if not size:
            return outputs
        src, dst = inputs.transpose(0, 1).contiguous(), outputs.transpose(0, 1).contiguous()
        [hidden_buf] = self._workspace.split(4 * size)
        structs = _numbered_array(numbered)
        self._kernels.call(
            "baton_add_head_low_rank",
            groups=self._tokens.struct(structs),
            src=src,
            dst=dst,
            hidden_buf=hidden_buf,
            num_heads=num_heads,
            num_tokens=num_tokens,
            num_columns=num_columns,
            num_rows=outputs.shape[2],
        )
        return dst.transpose(0, 1)

    def mix_experts(self, pass_: ExpertPass, groups: Sequence[Group]) -> Tensor | None:
        ops, moe, layer, gate, inputs, routing = pass_
        experts = ops.join_experts(moe) if isinstance(ops, NativeOps) else None
        if experts is None or not isinstance(ops, NativeOps):
            return None
        adapters = self._use(groups)
        gate_up = [adapter.numbered.get(Place(layer, "gate_up")) for adapter in adapters]
        down = [adapter.numbered.get(Place(layer, "down")) for adapter in adapters]
        size = max(_hidden_size(gate_up, groups), _hidden_size(down, groups))
        structs, down_structs = _numbered_array(gate_up), _numbered_array(down)
        added = AddedProducts(
            self._tokens.struct(structs),
            ctypes.addressof(down_structs),
            4 * size * routing.expert_ids.shape[1],
        )
        return ops.experts.mix(experts, moe, gate, inputs, routing, added)

    def _use(self, groups: Sequence[Group]) -> Sequence[NativeAdapter]:
        """Return the adapters of the groups, whose tokens are those of the next call."""
        if groups is not self._tokens.groups:
            self._tokens = GroupTokens(groups)
        return [native_adapter(group) for group in groups]


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
    """Arguments of fused layers that a pass with adapters has besides the others."""

    def __init__(self, groups: Sequence[Group]) -> None:
        adapters = [native_adapter(group) for group in groups]
        tokens = GroupTokens(groups)
        structs = _adapter_array([adapter.fused for adapter in adapters])
        size = sum(
            max(adapter.ranks.values(), default=0) * len(group.tokens)
            for adapter, group in zip(adapters, groups, strict=True)
        )
        buffer = torch.empty(size)
        self.args = {"groups": tokens.struct(structs), "hidden_buf": buffer.data_ptr()}
        self._alive = (groups, tokens, structs, buffer)


def native_adapter(group: Group) -> NativeAdapter:
    """Return the adapter of a group. Raises TypeError for one of other products."""
    if not isinstance(group.adapter, NativeAdapter):
        raise TypeError(f"native kernels need adapters of their own, not {group.adapter!r}")
    return group.adapter


def _adapter_array(places: Sequence[Places]) -> ctypes.Array[Struct]:
    return (LowRankAdapter * len(places))(*(LowRankAdapter(*each) for each in places))


def _numbered_array(numbered: Sequence[NumberedPlaces | None]) -> ctypes.Array[Struct]:
    return _adapter_array([NO_PLACES if each is None else each.places for each in numbered])


def _hidden_size(numbered: Sequence[NumberedPlaces | None], groups: Sequence[Group]) -> int:
    """Return the numbers of a head, or of an expert of each token, between the two products."""
    pairs = zip(numbered, groups, strict=True)
    return sum(each.max_rank * len(group.tokens) for each, group in pairs if each is not None)


def _join(parts: Mapping[Place, Sequence[Part]]) -> Mapping[Place, Sequence[Part]]:
    """Copy all matrices to memory on huge pages, one behind the other: they are small."""
    matrices = {
        id(matrix): matrix
        for its in parts.values()
        for part in its
        for matrix in (part.down, part.up)
    }
    sizes = [-(-matrix.nbytes // ALIGNMENT) * ALIGNMENT for matrix in matrices.values()]
    if not sizes:
        return parts
    memory = torch.frombuffer(huge_page_memory(sum(sizes)), dtype=torch.uint8)
    joined = {}
    for (key, matrix), space in zip(matrices.items(), memory.split(sizes), strict=True):
        joined[key] = space[: matrix.nbytes].view(matrix.dtype).view(matrix.shape)
        joined[key].copy_(matrix)
    return {
        place: [Part(joined[id(each.down)], joined[id(each.up)], each.first_row) for each in its]
        for place, its in parts.items()
    }


def _make_adapter(parts: Mapping[Place, Sequence[Part]], num_layers: int) -> NativeAdapter:
    arrays = {place: _part_array(its) for place, its in parts.items()}
    own = {
        place: LowRankPlace(ctypes.addressof(array), len(parts[place]))
        for place, array in arrays.items()
    }
    ranks = {place: sum(len(part.down) for part in its) for place, its in parts.items()}
    fused = (LowRankPlace * first_place(num_layers))()
    numbers: dict[Place, list[int]] = {}
    for place, struct in own.items():
        if place.number is not None:
            numbers.setdefault(place._replace(number=None), []).append(place.number)
        elif place.name in FUSED:
            fused[first_place(place.layer) + FUSED.index(place.name)] = struct
    numbered, tables = dict[Place, NumberedPlaces](), []
    for place, its in numbers.items():
        table = (LowRankPlace * (max(its) + 1))()
        for number in its:
            table[number] = own[place._replace(number=number)]
        tables.append(table)
        max_rank = max(ranks[place._replace(number=number)] for number in its)
        numbered[place] = NumberedPlaces(_places(table), max_rank)
    return NativeAdapter(
        parts,
        fused=_places(fused),
        places={place: Places(ctypes.addressof(struct), 1) for place, struct in own.items()},
        numbered=numbered,
        ranks=ranks,
        alive=(arrays, own, fused, tables),
    )


def _places(array: ctypes.Array[Struct]) -> Places:
    return Places(ctypes.addressof(array), len(array))


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
