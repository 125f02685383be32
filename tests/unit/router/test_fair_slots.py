"""Slots for reading files: few at once, and clients take turns."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from baton.router.fair_slots import FairSlots, turn_name
from baton.rpc.errors import QueueFull


class Readers:
    """Requests that hold a slot until they are told to end."""

    def __init__(self, slots: FairSlots) -> None:
        self.running: list[str] = []
        self._slots = slots
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """Begin requests; the first letter of a name is the client, `-` one without a token."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.ensure_future(self._hold(name))
        await self._settle()

    def let_end(self, name: str) -> None:
        self._ends[name].set()

    async def end(self, name: str) -> None:
        self.let_end(name)
        await self.tasks.pop(name)
        await self._settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks.pop(name)])
        await self._settle()

    async def _hold(self, name: str) -> None:
        async with self._slots.slot(name[0].strip("-")):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)

    async def _settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)


def test_a_client_holds_half_of_the_slots_and_clients_take_turns() -> None:
    async def run() -> None:
        slots = FairSlots(2, 8, max_per_client=1, what="files")
        readers = Readers(slots)
        await readers.begin("a1", "a2", "a3", "b1", "b2", "c1")
        assert readers.running == ["a1", "b1"]
        for ended, running in (
            ("a1", ["b1", "c1"]),
            ("b1", ["c1", "a2"]),
            ("c1", ["a2", "b2"]),
            ("a2", ["b2", "a3"]),
            ("b2", ["a3"]),
            ("a3", []),
        ):
            await readers.end(ended)
            assert readers.running == running

    asyncio.run(run())


def test_clients_without_a_token_share_all_slots() -> None:
    async def run() -> None:
        readers = Readers(FairSlots(2, 8, max_per_client=1, what="files"))
        await readers.begin("-1", "-2", "-3")
        assert readers.running == ["-1", "-2"]
        await readers.end("-1")
        assert readers.running == ["-2", "-3"]
        for name in list(readers.tasks):
            await readers.end(name)

    asyncio.run(run())


def test_hosts_without_a_token_take_turns_without_limits() -> None:
    assert turn_name("", "") == ""
    assert turn_name("token", "h") == turn_name("token", "i")
    one, other = turn_name("", "h"), turn_name("", "i")

    async def run() -> None:
        slots = FairSlots(2, 8, max_per_client=1, what="files")
        for _ in range(2):
            await slots.acquire(one)
        waiting = [asyncio.ensure_future(slots.acquire(one)) for _ in range(7)]
        waiting.append(asyncio.ensure_future(slots.acquire(other)))
        await asyncio.sleep(0)
        slots.release(one)
        await asyncio.wait_for(waiting.pop(), timeout=10)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)

    asyncio.run(run())


def test_a_cancelled_request_gives_up_its_place_or_its_slot() -> None:
    async def run() -> None:
        slots = FairSlots(2, 8, max_per_client=1, what="files")
        readers = Readers(slots)
        await readers.begin("a1", "b1", "a2", "c1", "c2")
        await readers.cancel("c1")
        assert slots.num_waiting == 2
        await readers.cancel("b1")
        assert readers.running == ["a1", "c2"]
        # Cancelled in the same moment in which it gets its slot.
        readers.tasks["a1"].cancel()
        await asyncio.sleep(0)
        await readers.cancel("a2")
        await readers.begin("d1")
        assert readers.running == ["c2", "d1"]
        # Cancelled, but not yet run when a slot is free.
        await readers.begin("e1", "f1")
        readers.let_end("d1")
        readers.tasks["e1"].cancel()
        await readers.end("d1")
        assert readers.running == ["c2", "f1"]
        for name in ("c2", "f1"):
            await readers.end(name)

    asyncio.run(run())


def test_the_queue_has_a_limit_of_which_a_client_gets_half() -> None:
    async def run() -> None:
        slots = FairSlots(2, 4, max_per_client=1, what="files")
        readers = Readers(slots)
        await readers.begin("a1", "a2", "a3")
        async with AsyncExitStack() as held:
            with pytest.raises(QueueFull, match="already wait to be read"):
                await held.enter_async_context(slots.slot("a"))
            await readers.begin("b1", "b2", "b3")
            with pytest.raises(QueueFull, match="4 files"):
                await held.enter_async_context(slots.slot("c"))
        for name in list(readers.tasks):
            await readers.cancel(name)
        assert slots.num_waiting == 0

    asyncio.run(run())
