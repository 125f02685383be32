"""Loads of adapters in any order, with cancelled requests and failing files: nothing is leaked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import NamedError
from baton.node.adapters.loader import AdapterLoader
from tests.support.fake_adapters import FakeMemory
from tests.support.waits import until

ADAPTERS = "abcd"


class Requests:
    """Requests that use adapters until they are told to end."""

    def __init__(self, loader: AdapterLoader, memory: FakeMemory) -> None:
        self._loader = loader
        self._memory = memory
        self.tasks: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.Event] = []

    async def start(self, adapter_id: str) -> None:
        self._ends.append(asyncio.Event())
        self.tasks.append(asyncio.ensure_future(self._use(adapter_id, self._ends[-1])))

    async def end(self, number: int) -> None:
        if self._ends:
            self._ends[number % len(self._ends)].set()

    async def cancel(self, number: int) -> None:
        if self.tasks:
            self.tasks[number % len(self.tasks)].cancel()

    async def forget(self, adapter_id: str) -> None:
        self._loader.keep(adapter_id, is_kept=False)

    async def break_files(self, broken: str) -> None:
        self._memory.broken = broken

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def end_all(self) -> None:
        for end in self._ends:
            end.set()
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 30)

    async def _use(self, adapter_id: str, end: asyncio.Event) -> None:
        with suppress(NamedError):
            async with self._loader.held(adapter_id, lambda: Path(adapter_id)):
                assert adapter_id in self._memory.content
                await end.wait()
                assert adapter_id in self._memory.content


Order = Callable[[Requests, Any], Awaitable[None]]


def drawn(order: Order, values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Order, Any]]:
    return st.tuples(st.just(order), values)


numbers = st.integers(0, 20)
starts = drawn(Requests.start, st.sampled_from(ADAPTERS))
orders = st.lists(
    st.one_of(
        starts,
        starts,
        drawn(Requests.end, numbers),
        drawn(Requests.cancel, numbers),
        drawn(Requests.forget, st.sampled_from(ADAPTERS)),
        drawn(Requests.break_files, st.sampled_from(["", "a", "bc"])),
        drawn(Requests.rest, st.sampled_from([0.0, 0.0, 0.001])),
    ),
    max_size=40,
)


@given(orders, st.integers(1, 3))
def test_adapters_stay_while_they_are_used_and_nothing_is_leaked(
    given_orders: list[tuple[Order, Any]], num_places: int
) -> None:
    async def scenario() -> None:
        memory = FakeMemory()
        with AdapterLoader(memory, num_places) as loader:
            requests = Requests(loader, memory)
            for order, value in given_orders:
                await order(requests, value)
                assert len(memory.content) <= num_places
            await requests.end_all()
            # A load without a request that waits for it may still run.
            await until(lambda: not loader.counts().num_reading)

            for task in requests.tasks:
                assert task.cancelled() or task.exception() is None
            assert len(loader.report()) == len(memory.content) <= num_places
            assert all(loader.num_users(adapter_id) == 0 for adapter_id in ADAPTERS)
            counts = loader.counts()
            assert counts.num_waiting_for_place == counts.num_waiting_for_load == 0

    asyncio.run(scenario())
