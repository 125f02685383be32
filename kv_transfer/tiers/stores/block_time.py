"""Modification time of a block's file: what a store keeps of a block over restarts. Pure.

Times of older versions, and those that others set, mean the default priority. Older versions read a
time with a priority as one within the same second.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.kv_transfer.tiers.eviction import DEFAULT_PRIORITY

MAX_PRIORITY = 100
_NS = 1_000_000_000
# Of the fraction of a second, the first three digits mark a priority, the next three are it, and
# the others are 0. File systems keep microseconds at least; clocks seldom hit such a fraction.
_MARK, _PRIORITY_NS = 735, 1000


@dataclass(frozen=True, slots=True)
class BlockTime:
    used_s: float  # last use; in the future: end of the retention; 0: the block is released
    priority: int = DEFAULT_PRIORITY

    @classmethod
    def from_ns(cls, time_ns: int) -> BlockTime:
        mark, rest = divmod(time_ns % _NS, 1000 * _PRIORITY_NS)
        priority, below = divmod(rest, _PRIORITY_NS)
        if mark == _MARK and priority <= MAX_PRIORITY and not below:
            return cls(float(time_ns // _NS), priority)
        return cls(time_ns / _NS)

    def to_ns(self) -> int:
        if self.priority == DEFAULT_PRIORITY or not self.used_s:
            return int(self.used_s * _NS)
        return int(self.used_s) * _NS + (_MARK * 1000 + self.priority) * _PRIORITY_NS
