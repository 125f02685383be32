"""State of a node that it reports: its card, load, cached prefixes and draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from node.engine_calls import EngineCalls
from node.status_feed import ReadUpdate
from rpc.cached_prefixes import CachedPrefixes, PrefixChanges, PrefixWatcher
from rpc.errors import Draining
from rpc.node_info import NodeCard, NodeLoad

# Minimum interval between updates. Changes within it are sent as one.
PACE_S = 0.01


class NodeState:
    def __init__(self, card: NodeCard, calls: EngineCalls, read_news: ReadUpdate) -> None:
        self.card = card
        self.calls = calls
        self._read_news = read_news
        self._load = NodeLoad()
        self._prefixes = CachedPrefixes()
        self._published = asyncio.Event()
        self._drain_wanted = asyncio.Event()
        self._num_calls = 0
        self._became_idle = asyncio.Event()
        self._became_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._drain_wanted.is_set()

    def drain(self) -> None:
        """Refuse new calls from now on."""
        self._drain_wanted.set()
        self.calls.touch()

    async def drain_wanted(self) -> None:
        await self._drain_wanted.wait()

    @property
    def num_calls(self) -> int:
        return self._num_calls

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call, for whose end a drain waits. Raises Draining."""
        if self.is_draining:
            raise Draining(f"node {self.card.node_id} is draining; use another node")
        self._num_calls += 1
        self._became_idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._became_idle.set()

    async def idle(self) -> None:
        """Return when no call is in flight. Calls that wait for their last KV write count."""
        await self._became_idle.wait()

    async def follow(self) -> None:
        """Publish the node's load and prefixes at each change, with or without watchers."""
        while True:
            changed = self.calls.next_change()
            news = await self._read_news()
            self._prefixes.take(news.kv_events)
            self._load = replace(news.load, is_draining=self.is_draining)
            self._published.set()
            self._published = asyncio.Event()
            await asyncio.sleep(PACE_S)
            await changed.wait()

    async def news(self) -> AsyncGenerator[tuple[NodeLoad, PrefixChanges | None], None]:
        """Yield the current load and prefixes, then each change."""
        last_load: NodeLoad | None = None
        prefixes = PrefixWatcher(self._prefixes)
        published = self._published
        self.calls.touch()
        while True:
            await published.wait()
            published = self._published
            load, changes = self._load, prefixes.next()
            if load != last_load or changes is not None:
                yield load, changes
                last_load = load
