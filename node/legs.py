"""Legs that a node offers, those in progress, and the change from one kind to another."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from baton.core.legs import GENERATING, MAX_DRAIN_S, LegKind, Legs
from baton.rpc.errors import Draining, UnsupportedInput


class OfferedLegs:
    """Legs of a node. `on_change` is called when it offers others."""

    def __init__(self, offered: Legs, on_change: Callable[[], None] = lambda: None) -> None:
        self.offered = offered
        self._generates = any(kind in GENERATING for kind in offered)
        self._on_change = on_change
        self._in_progress: defaultdict[LegKind, set[asyncio.Task[object]]] = defaultdict(set)
        self._moved: set[asyncio.Task[object]] = set()
        self._ended = asyncio.Event()  # of any leg
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Legs]] = set()  # one after the other

    @contextmanager
    def serving(self, kind: LegKind) -> Iterator[None]:
        """Run a leg until the block ends.

        Raises Draining if the node does not offer such legs, or no longer does: the router then
        tries another node, which continues the answer where this one left it.
        """
        if kind not in self.offered:
            raise Draining(f"this node offers no {kind.value} legs; use another node")
        task = asyncio.current_task()
        assert task is not None
        self._in_progress[kind].add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._moved:
                raise
            task.uncancel()
            raise Draining(f"this node offers no {kind.value} legs any more") from None
        finally:
            self._in_progress[kind].discard(task)
            self._moved.discard(task)
            self._ended.set()

    async def change(self, wanted: Collection[LegKind], drain_timeout_s: float) -> Legs:
        """Offer these legs instead of others, when those in progress have ended or moved.

        Legs that the node no longer offers may end for `drain_timeout_s`; then other nodes continue
        them. Weights and cached KV stay. Raises UnsupportedInput.
        """
        if not wanted or LegKind.ENCODE in wanted:
            raise UnsupportedInput("name prefill legs, decode legs or both")
        if not self._generates:
            raise UnsupportedInput("this node generates no text")
        if not 0 <= drain_timeout_s <= MAX_DRAIN_S:  # also for NaN, which breaks timers
            raise UnsupportedInput(
                f"drain_timeout_s is {drain_timeout_s:g}; it must be from 0 to {MAX_DRAIN_S:g}",
                "drain_timeout_s",
            )
        change = asyncio.ensure_future(self._change(wanted, drain_timeout_s))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)  # half of one would leave a node without legs

    async def _change(self, wanted: Collection[LegKind], drain_timeout_s: float) -> Legs:
        async with self._changing:
            kept = {*wanted} | ({*self.offered} - {*GENERATING})
            dropped = [kind for kind in self.offered if kind not in kept]
            self._offer(kind for kind in self.offered if kind in kept)
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_timeout_s):
                    await self._until_ended(dropped)
            self._move(dropped)
            await self._until_ended(dropped)
            self._offer(kind for kind in LegKind if kind in kept)
            return self.offered

    def _offer(self, kinds: Iterator[LegKind]) -> None:
        self.offered = tuple(kinds)
        self._on_change()

    def _move(self, kinds: Collection[LegKind]) -> None:
        tasks = {task for kind in kinds for task in self._in_progress[kind]}
        self._moved |= tasks
        for task in tasks:
            task.cancel()

    async def _until_ended(self, kinds: Collection[LegKind]) -> None:
        while any(self._in_progress[kind] for kind in kinds):
            self._ended.clear()
            await self._ended.wait()
