"""Adapters in memory, the least recently used first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class ResidentAdapter:
    num_bytes: int
    num_users: int  # requests in progress; it is not evicted before their end
    number: int  # in the order in which adapters came into memory
    is_kept: bool = True  # without users, until its place is needed


class ResidentAdapters:
    """At most `num_places` adapters, by id, counting those that are being read."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_reserved = 0  # of those that are being read
        self._by_id: OrderedDict[str, ResidentAdapter] = OrderedDict()
        self._num_filled = 0

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        """Return the memory of all. For any thread."""
        return sum(each.num_bytes for each in tuple(self._by_id.values()))

    @property
    def num_in_use(self) -> int:
        """Return the number of adapters that have users. For any thread."""
        return sum(each.num_users > 0 for each in tuple(self._by_id.values()))

    @property
    def oldest(self) -> str | None:
        """The adapter that has been in memory for the longest time."""
        return min(self._by_id, key=lambda each: self._by_id[each].number, default=None)

    def find(self, adapter_id: str) -> ResidentAdapter | None:
        return self._by_id.get(adapter_id)

    def reserve(self) -> list[str] | None:
        """Reserve a place. Returns the ids evicted for it, or None if all places are in use."""
        evicted: list[str] = []
        if len(self._by_id) + self.num_reserved >= self.num_places:
            oldest = next((id_ for id_, each in self._by_id.items() if not each.num_users), None)
            if oldest is None:
                return None
            del self._by_id[oldest]
            evicted.append(oldest)
        self.num_reserved += 1
        return evicted

    def give_back(self) -> None:
        """Give back a reserved place."""
        self.num_reserved -= 1

    def fill(self, adapter_id: str, num_bytes: int, num_users: int) -> None:
        """Put an adapter into a reserved place."""
        self.num_reserved -= 1
        self._num_filled += 1
        self._by_id[adapter_id] = ResidentAdapter(num_bytes, num_users, self._num_filled)

    def use(self, adapter_id: str, num_users: int = 1) -> None:
        """Count users of an adapter that is in memory."""
        self._by_id.move_to_end(adapter_id)
        self._by_id[adapter_id].num_users += num_users

    def release(self, adapter_id: str) -> bool:
        """Count a user less. Returns whether this removes the adapter."""
        found = self._by_id[adapter_id]
        found.num_users -= 1
        return self._remove_unless_needed(adapter_id, found)

    def forget(self, adapter_id: str) -> bool:
        """Keep an adapter only for those who use it. Returns whether this removes it."""
        found = self._by_id.get(adapter_id)
        if found is None:
            return False
        found.is_kept = False
        return self._remove_unless_needed(adapter_id, found)

    def keep(self, adapter_id: str) -> None:
        """Keep an adapter in memory that was forgotten."""
        self._by_id[adapter_id].is_kept = True

    def _remove_unless_needed(self, adapter_id: str, found: ResidentAdapter) -> bool:
        if found.num_users or found.is_kept:
            return False
        del self._by_id[adapter_id]
        return True
