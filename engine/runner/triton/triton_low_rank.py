"""Products of adapters in Triton: two launches for a linear layer, whatever the adapters are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import triton
from torch import Tensor

from baton.engine.runner.adapters.low_rank import Adapter, Group, ProductsOneByOne, convert_parts
from baton.engine.runner.adapters.place import Part, Place
from baton.engine.runner.triton.launching import launch, row_contiguous
from baton.engine.runner.triton.low_rank_kernels import expand_kernel, project_kernel

TILE_RANKS, TILE_COLUMNS = 16, 128
TILE_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TritonAdapter(Adapter):
    """An adapter with its table on the device."""

    table: Tensor = field(repr=False)


class TritonLowRankProducts(ProductsOneByOne):
    """Implements `LowRankProducts`. One thread adds, while another one can prepare."""

    def __init__(self) -> None:
        self._indices: dict[Place, int] = {}  # in the tables of all adapters
        self._pass = _GroupedPass((), torch.device("cpu"))
        self._compiled = set[tuple[torch.dtype, tuple[int, int]]]()  # sizes of inputs and outputs

    def prepare(
        self, parts: Mapping[Place, Sequence[Part]], like: Tensor, num_layers: int
    ) -> Adapter:
        converted = convert_parts(parts, like)
        for place in converted:
            self._indices.setdefault(place, len(self._indices))
        numbers = make_table({self._indices[place]: its for place, its in converted.items()})
        adapter = TritonAdapter(converted, table=torch.tensor(numbers).to(like.device))
        self._compile(adapter, like)
        return adapter

    def add(self, place: Place, groups: Sequence[Group], inputs: Tensor, outputs: Tensor) -> None:
        if groups is not self._pass.groups:
            self._pass = _GroupedPass(groups, inputs.device)
        self._add(place, self._pass, inputs, outputs)

    def _compile(self, adapter: Adapter, like: Tensor) -> None:
        """Launch the kernels for each new size, so that the first request does not wait for them.

        Loads have a thread of their own.
        """
        token = torch.zeros(1, dtype=torch.int64, device=like.device)
        for place, parts in adapter.parts.items():
            part = parts[-1]
            shape = part.down.shape[1], part.first_row + part.up.shape[1]
            if (like.dtype, shape) not in self._compiled:
                self._compiled.add((like.dtype, shape))
                inputs, outputs = (like.new_zeros(1, size) for size in shape)
                self._add(
                    place, _GroupedPass([Group(adapter, token)], like.device), inputs, outputs
                )

    def _add(self, place: Place, own: _GroupedPass, inputs: Tensor, outputs: Tensor) -> None:
        index, (max_parts, max_rank) = self._indices.get(place), own.size(place)
        if index is None or not max_parts:
            return
        num_tokens, src, num_rows = len(own.tokens), row_contiguous(inputs), outputs.shape[1]
        rank_tiles = triton.cdiv(max_rank, TILE_RANKS)
        shape = num_tokens, max_parts, rank_tiles * TILE_RANKS
        hidden = torch.empty(shape, dtype=torch.float32, device=src.device)
        which = own.tables, own.group_ids, own.tokens, index
        launch(
            project_kernel,
            (num_tokens, max_parts, rank_tiles),
            hidden,
            src,
            *which,
            src.stride(0),
            src.shape[1],
            *shape[1:],
            tile_ranks=TILE_RANKS,
            tile_columns=TILE_COLUMNS,
        )
        launch(
            expand_kernel,
            (num_tokens, triton.cdiv(num_rows, TILE_ROWS)),
            outputs,
            hidden,
            *which,
            outputs.stride(0),
            num_rows,
            *shape[1:],
            tile_rows=TILE_ROWS,
        )


class _GroupedPass:
    """Tokens of a pass with adapters, and the addresses of these."""

    def __init__(self, groups: Sequence[Group], device: torch.device) -> None:
        self.groups = groups
        self._adapters = [triton_adapter(group) for group in groups]
        self._sizes: dict[Place, tuple[int, int]] = {}
        counts = torch.tensor([len(group.tokens) for group in groups], dtype=torch.int64)
        ids = torch.arange(len(groups), dtype=torch.int32).repeat_interleave(counts)
        addresses = torch.tensor(
            [each.table.data_ptr() for each in self._adapters], dtype=torch.int64
        )
        self.group_ids, self.tables = ids.to(device), addresses.to(device)
        self.tokens = torch.cat([group.tokens for group in groups]) if groups else self.group_ids

    def size(self, place: Place) -> tuple[int, int]:
        """Return the most parts that an adapter has for a place, and their highest rank."""
        if place not in self._sizes:
            parts = [adapter.parts.get(place, ()) for adapter in self._adapters]
            ranks = [len(part.down) for part in chain(*parts)]
            self._sizes[place] = max(map(len, parts), default=0), max(ranks, default=0)
        return self._sizes[place]


def make_table(parts: Mapping[int, Sequence[Part]]) -> list[int]:
    """Return the table of an adapter that has these parts, by the index of their place.

    It has the number of places, then for each the index in the table of its first part and the
    number of parts, and then five numbers for each part, as the kernels read them.
    """
    num_places = 1 + max(parts, default=-1)
    header, numbers = [num_places], list[int]()
    for index in range(num_places):
        own = parts.get(index, ())
        header += [1 + 2 * num_places + len(numbers), len(own)]
        for part in own:
            numbers += [part.down.data_ptr(), part.up.data_ptr(), len(part.down)]
            numbers += [part.first_row, part.up.shape[1]]
    return header + numbers


def triton_adapter(group: Group) -> TritonAdapter:
    """Return the adapter of a group. Raises TypeError for one of other products."""
    if not isinstance(group.adapter, TritonAdapter):
        raise TypeError(f"Triton kernels need adapters of their own, not {group.adapter!r}")
    return group.adapter
