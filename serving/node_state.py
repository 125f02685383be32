"""What a node's process knows of itself: who it is, how busy, whether it is on its way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from serving.engine_calls import EngineCalls
from serving.errors import Draining
from serving.node import NodeCard, NodeLoad


class NodeState:
    def __init__(
        self, card: NodeCard, calls: EngineCalls, read_load: Callable[[], Awaitable[NodeLoad]]
    ) -> None:
        self.card = card
        self.calls = calls
        self._read_load = read_load
        self._drain_wanted = asyncio.Event()
        self._num_calls = 0
        self._became_idle = asyncio.Event()
        self._became_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._drain_wanted.is_set()

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._drain_wanted.set()
        self.calls.touch()

    async def drain_wanted(self) -> None:
        await self._drain_wanted.wait()

    @property
    def num_calls(self) -> int:
        return self._num_calls

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call, which a drain waits for. Raises Draining."""
        if self.is_draining:
            raise Draining(f"node {self.card.node_id} is on its way out; send it elsewhere")
        self._num_calls += 1
        self._became_idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._became_idle.set()

    async def idle(self) -> None:
        """Returns when no call is under way: those that wait for their last write count."""
        await self._became_idle.wait()

    async def loads(self) -> AsyncGenerator[NodeLoad, None]:
        """The load now, and again whenever it changed."""
        told: NodeLoad | None = None
        while True:
            changed = self.calls.next_change()
            load = replace(await self._read_load(), is_draining=self.is_draining)
            if load != told:
                yield load
                told = load
            await changed.wait()
