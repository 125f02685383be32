"""Simulated node: KV cache and host memory with LRU replacement, and a queue of prompts."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.engine.events import BlockRemoved, BlockStored, KvEvent
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.kv_transfer.external_kv import HeldChanges
from baton.router.routing.served_models import Node
from baton.rpc.cached_prefixes import CachedPrefixes, PrefixChanges, PrefixWatcher

Names = Sequence[BlockHash]
Visit = TypeVar("Visit")


class LruBlocks:
    """Names of blocks in a memory of fixed size."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._names: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._names

    def touch(self, names: Names) -> None:
        """Mark names as used. The end of a sequence is replaced first."""
        for name in reversed(names):
            if name in self._names:
                self._names.move_to_end(name)

    def add(self, names: Names) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Add what is missing. Returns the names that came and stayed, and those that left."""
        added = dict.fromkeys(name for name in reversed(names) if name not in self._names)
        self._names.update(added)
        removed = dict.fromkeys(
            self._names.popitem(last=False)[0]
            for _ in range(max(0, len(self._names) - self._num_blocks))
        )
        stayed = tuple(name for name in added if name not in removed)
        return stayed, tuple(name for name in removed if name not in added)


@dataclass(frozen=True, slots=True)
class Sources:
    """Leading blocks of a prompt by the place that they come from, in this order."""

    cache: int = 0
    host: int = 0
    file: int = 0
    peer: int = 0

    @property
    def num_blocks(self) -> int:
        return self.cache + self.host + self.file + self.peer


@dataclass(slots=True)
class SimNode(Generic[Visit]):
    """Simulated node. It reports changes by the code of real nodes."""

    node: Node
    num_watchers: int
    waiting: deque[Visit] = field(default_factory=deque)  # the first is being computed
    num_requests: int = 0
    most_requests: int = 0
    num_tokens: int = 0
    _cache: LruBlocks = field(init=False)
    _host: LruBlocks = field(init=False)
    _reported: CachedPrefixes = field(init=False, default_factory=CachedPrefixes)
    _watchers: list[PrefixWatcher] = field(init=False)

    def __post_init__(self) -> None:
        self._cache = LruBlocks(self.node.card.num_blocks)
        self._host = LruBlocks(self.node.card.num_host_blocks)
        self._watchers = [PrefixWatcher(self._reported) for _ in range(self.num_watchers)]

    def begin(self, num_tokens: int) -> None:
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.most_requests = max(self.most_requests, self.num_requests)

    def num_cached(self, names: Names) -> int:
        """Return the number of leading blocks in the KV cache."""
        return _num_leading(names, lambda name: name in self._cache)

    def num_held(self, names: Names) -> int:
        """Return the number of leading blocks in the KV cache or in host memory."""
        return _num_leading(names, self._has)

    def find(self, names: Names, files: set[BlockHash], num_on_peer: int) -> Sources:
        """Return the leading blocks of a prompt by their source."""
        num_cached, num_held = self.num_cached(names), self.num_held(names)
        num_local = _num_leading(names, lambda name: self._has(name) or name in files)
        num_pulled = max(0, num_on_peer - num_local)
        return Sources(num_cached, num_held - num_cached, num_local - num_held, num_pulled)

    def store(self, names: Names) -> None:
        """Put the blocks of a sequence into the KV cache, and new ones into host memory as well."""
        self._cache.touch(names)
        events: list[KvEvent] = []
        stored, removed = self._cache.add(names)
        events += [BlockRemoved(removed)] if removed else []
        events += [BlockStored(stored, None, (), 1)] if stored else []
        self._reported.take(events, HeldChanges(*self._host.add(names)))

    def take_changes(self, watcher: int) -> list[PrefixChanges]:
        """Return the changes that have not been sent to a router yet."""
        return list(iter(self._watchers[watcher].next, None))

    def _has(self, name: BlockHash) -> bool:
        return name in self._cache or name in self._host


def _num_leading(names: Iterable[BlockHash], has: Callable[[BlockHash], bool]) -> int:
    num_blocks = 0
    for name in names:
        if not has(name):
            break
        num_blocks += 1
    return num_blocks
