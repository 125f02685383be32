"""Adapters on a device, and the addresses of those of a pass's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from baton.engine.runner.model.adapters import Adapter, Group, Part, Place, PlaceSize

Numbered = Mapping[int | None, Sequence[Part]]  # parts of a place by head or expert, if it has some
NO_PARTS = PlaceSize(0, 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TritonAdapter(Adapter):
    """An adapter with its table on the device."""

    table: Tensor = field(repr=False)
    sizes: Mapping[Place, PlaceSize]  # by place without its number

    @property
    def address(self) -> int:
        return self.table.data_ptr()


class TokenTables(Sequence[Group]):
    """Tokens of a pass, each with the address of its adapter's table, or zero."""

    def __init__(
        self,
        addresses: Tensor,
        adapters: Sequence[TritonAdapter],
        sizes: Mapping[Place, PlaceSize] | None = None,
    ) -> None:
        """Launches are of these sizes, by place without its number, or of those of the adapters."""
        self.addresses = addresses
        self._adapters = adapters
        self._sizes = {} if sizes is None else dict(sizes)
        self._are_given = sizes is not None

    @classmethod
    def of(cls, groups: Sequence[Group], num_tokens: int, device: torch.device) -> TokenTables:
        """Return the tables of groups: those that were put, or new ones."""
        if isinstance(groups, TokenTables):
            return groups
        addresses = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        adapters = [triton_adapter(group.adapter) for group in groups]
        for adapter, group in zip(adapters, groups, strict=True):
            addresses.index_fill_(0, group.tokens, adapter.address)
        return cls(addresses, adapters)

    def size(self, place: Place) -> PlaceSize:
        """Return the largest size for a place without its number."""
        if place not in self._sizes and not self._are_given:
            own = [adapter.sizes.get(place, NO_PARTS) for adapter in self._adapters]
            most = [max(numbers, default=0) for numbers in zip(*own, NO_PARTS, strict=True)]
            self._sizes[place] = PlaceSize(*most)
        return self._sizes.get(place, NO_PARTS)

    def __len__(self) -> int:
        return len(self._adapters)

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Group]: ...
    def __getitem__(self, index: int | slice) -> Group | Sequence[Group]:
        """Return a group, for which the host waits."""
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        adapter = self._adapters[index]
        return Group(adapter, (self.addresses == adapter.address).nonzero()[:, 0])


def triton_adapter(adapter: Adapter) -> TritonAdapter:
    """Return the adapter. Raises TypeError for one of other products."""
    if not isinstance(adapter, TritonAdapter):
        raise TypeError(f"Triton kernels need adapters of their own, not {adapter!r}")
    return adapter


def by_place(parts: Mapping[Place, Sequence[Part]]) -> Mapping[Place, Numbered]:
    """Return the parts by place without its number, and by number."""
    found: dict[Place, dict[int | None, Sequence[Part]]] = {}
    for place, its in parts.items():
        found.setdefault(place._replace(number=None), {})[place.number] = its
    return found


def largest_size(numbered: Numbered) -> PlaceSize:
    return PlaceSize(
        max(len(parts) for parts in numbered.values()),
        max(len(part.down) for parts in numbered.values() for part in parts),
    )


def make_table(places: Mapping[int, Numbered]) -> list[int]:
    """Return the table of an adapter that has these places, by their index.

    It has the number of places, and an entry for each: the index in the table of its first part and
    the number of parts; or, for a place of heads or experts, the index of the first of its own
    entries and their number. A part is five numbers, as the kernels read them.
    """
    table = [1 + max(places, default=-1)]
    table += [0] * (2 * table[0])
    for index, numbered in places.items():
        at = 1 + 2 * index
        if None in numbered:
            table[at : at + 2] = _append(table, numbered[None])
            continue
        first, count = len(table), 1 + max(each for each in numbered if each is not None)
        table[at : at + 2] = first, count
        table += [0] * (2 * count)
        for number, parts in numbered.items():
            at = first + 2 * (number or 0)
            table[at : at + 2] = _append(table, parts)
    return table


def _append(table: list[int], parts: Sequence[Part]) -> tuple[int, int]:
    """Append parts, and return their entry."""
    first = len(table)
    for part in parts:
        table += [part.down.data_ptr(), part.up.data_ptr(), len(part.down)]
        table += [part.first_row, part.up.shape[1]]
    return first, len(parts)
