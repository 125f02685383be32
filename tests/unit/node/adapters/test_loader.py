"""Loads of adapters: shared, limited in number, and undisturbed by cancelled requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.node.adapters.folder_threads import FolderThreads
from baton.node.adapters.loader import AdapterLoader
from baton.rpc.errors import AdaptersBusy, AdapterUnreadable
from tests.support.fake_adapters import PATIENCE_S, FakeMemory
from tests.support.waits import until


class DeadMount:
    """File system that does not answer until the test lets it."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.answers = threading.Event()

    def find(self, adapter_id: str) -> Path:
        self.num_asked += 1
        assert self.answers.wait(PATIENCE_S)
        return Path("adapters", adapter_id)


@dataclass(slots=True)
class World:
    memory: FakeMemory
    loader: AdapterLoader

    @asynccontextmanager
    async def held(self, adapter_id: str) -> AsyncGenerator[None]:
        async with self.loader.held(adapter_id, lambda: Path("adapters", adapter_id)):
            assert adapter_id in self.memory.content
            yield

    async def use(self, adapter_id: str) -> None:
        async with self.held(adapter_id):
            pass

    def start_on(self, mount: DeadMount, adapter_id: str) -> asyncio.Task[None]:
        async def use() -> None:
            async with self.loader.held(adapter_id, lambda: mount.find(adapter_id)):
                pass

        return asyncio.ensure_future(use())

    def start(self, adapter_id: str) -> asyncio.Task[None]:
        return asyncio.ensure_future(self.use(adapter_id))

    def assert_at_rest(self) -> None:
        """Check that nobody uses an adapter or a place, and that all that is in memory is known."""
        assert {each.id for each in self.loader.report()} == self.memory.content
        assert sum(self.loader.num_users(each) for each in self.memory.content) == 0
        counts = self.loader.counts()
        assert (counts.num_in_use, counts.num_reading) == (0, 0)
        assert (counts.num_waiting_for_place, counts.num_waiting_for_load) == (0, 0)


def run(
    scenario: Callable[[World], Coroutine[Any, Any, None]],
    *,
    num_places: int = 2,
    max_wait_s: float = PATIENCE_S,
    max_claim_s: float = PATIENCE_S,
    claim_after_s: float = PATIENCE_S,
    threads: FolderThreads | None = None,
) -> None:
    async def timed() -> None:
        memory = FakeMemory()
        loader = AdapterLoader(
            memory,
            num_places,
            max_wait_s=max_wait_s,
            max_claim_s=max_claim_s,
            claim_after_s=claim_after_s,
            threads=threads,
        )
        with loader:
            world = World(memory, loader)
            async with asyncio.timeout(PATIENCE_S):
                await scenario(world)
            world.assert_at_rest()

    asyncio.run(timed())


def test_requests_for_the_same_adapter_share_a_load() -> None:
    async def scenario(world: World) -> None:
        world.memory.may_read.clear()
        tasks = [world.start("a") for _ in range(3)]
        await until(lambda: world.memory.num_reads == 1)
        assert world.loader.counts().num_waiting_for_load == 3
        world.memory.may_read.set()
        await asyncio.gather(*tasks)
        await world.use("a")

        assert world.memory.num_reads == 1
        assert world.loader.counts().num_bytes == 10

    run(scenario)


def test_the_least_recently_used_adapter_is_evicted() -> None:
    async def scenario(world: World) -> None:
        for adapter_id in ("a", "b", "a", "c"):
            await world.use(adapter_id)

        assert world.memory.content == {"a", "c"}
        assert world.loader.total_evicted == 1

    run(scenario)


def test_an_adapter_in_use_is_not_evicted() -> None:
    async def scenario(world: World) -> None:
        async with world.held("a"):
            for adapter_id in ("b", "c", "d"):
                await world.use(adapter_id)
            assert world.memory.content == {"a", "d"}

    run(scenario)


def test_a_request_waits_for_a_place_in_its_turn() -> None:
    async def scenario(world: World) -> None:
        order: list[str] = []

        async def use(adapter_id: str) -> None:
            async with world.held(adapter_id):
                order.append(adapter_id)

        tasks = []
        async with world.held("a"):
            for number, adapter_id in enumerate("bcd"):
                tasks.append(asyncio.ensure_future(use(adapter_id)))
                await until(lambda: world.loader.counts().num_waiting_for_place > number)  # noqa: B023
        await asyncio.gather(*tasks)

        assert order == ["b", "c", "d"]

    run(scenario, num_places=1)


def test_a_request_without_a_place_is_refused_after_a_while() -> None:
    async def scenario(world: World) -> None:
        async with world.held("a"):
            with pytest.raises(AdaptersBusy, match="max-cpu-loras"):
                await world.use("b")
        await world.use("b")

    run(scenario, num_places=1, max_wait_s=0.01, max_claim_s=0.02)


def test_later_requests_for_the_oldest_adapter_wait_behind_one_that_claims_its_place() -> None:
    async def scenario(world: World) -> None:
        order: list[str] = []

        async def use(adapter_id: str) -> None:
            async with world.held(adapter_id):
                order.append(adapter_id)
                # Once "c" has the place of "a", the others need not wait until it is read.
                assert world.loader.counts().num_reading or "c" in world.memory.added

        async with world.held("b"):
            async with world.held("a"):
                first = asyncio.ensure_future(use("c"))
                await until(lambda: world.loader.counts().num_waiting_for_place == 1)
                await world.use("a")  # not the oldest: it is not claimed
                later = [asyncio.ensure_future(use("b")) for _ in range(3)]
                await until(lambda: world.loader.counts().num_waiting_for_place == 4)
                assert not order
            await first
            await asyncio.gather(*later)

        assert sorted(order) == ["b", "b", "b", "c"]
        assert world.memory.num_reads == 3  # "b" was in memory all the time

    run(scenario, claim_after_s=0.0)


def test_a_claim_outlasts_the_wait_of_others() -> None:
    async def scenario(world: World) -> None:
        async with world.held("a"):
            first = world.start("b")
            await until(lambda: world.loader.counts().num_waiting_for_place == 1)
            with pytest.raises(AdaptersBusy):
                await world.use("c")
            assert not first.done()
        await first

    run(scenario, num_places=1, max_wait_s=0.01, max_claim_s=60.0)


def test_a_cancelled_request_leaves_the_load_to_others() -> None:
    async def scenario(world: World) -> None:
        world.memory.may_read.clear()
        first, second = world.start("a"), world.start("a")
        await until(lambda: world.memory.num_reads == 1)
        first.cancel()
        await asyncio.wait([first])
        world.memory.may_read.set()
        await second

        assert first.cancelled()
        assert world.memory.num_reads == 1

    run(scenario)


def test_a_load_that_nobody_waits_for_any_more_is_kept() -> None:
    async def scenario(world: World) -> None:
        world.memory.may_read.clear()
        task = world.start("a")
        await until(lambda: world.memory.num_reads == 1)
        task.cancel()
        await asyncio.wait([task])
        world.memory.may_read.set()
        await until(lambda: world.loader.find("a"))

    run(scenario)


def test_a_cancelled_request_waits_for_no_place_any_more() -> None:
    async def scenario(world: World) -> None:
        async with world.held("a"):
            task = world.start("b")
            await until(lambda: world.loader.counts().num_waiting_for_place == 1)
            task.cancel()
            again = world.start("b")  # a load of its own
            await asyncio.wait([task])
            await until(lambda: world.loader.counts().num_waiting_for_place == 1)
        await again

        assert task.cancelled()
        assert world.memory.content == {"b"}

    run(scenario, num_places=1)


def test_a_request_that_is_cancelled_when_its_adapter_comes_does_not_keep_it() -> None:
    async def scenario(world: World) -> None:
        task = world.start("a")
        world.memory.on_add = lambda: cancelled.append(task.cancel())
        cancelled: list[bool] = []
        await asyncio.wait([task])

        assert task.cancelled()
        assert cancelled == [True]
        assert world.memory.content == {"a"}

    run(scenario)


def test_a_failed_load_fails_all_its_requests_and_gives_its_place_back() -> None:
    async def scenario(world: World) -> None:
        world.memory.broken = {"a"}
        outcomes = await asyncio.gather(*(world.use("a") for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in outcomes] == [AdapterUnreadable] * 3
        world.memory.broken = set()
        await world.use("a")

        assert world.loader.total_failed == 1

    run(scenario, num_places=1)


def test_a_failed_load_gives_its_place_to_the_next() -> None:
    async def scenario(world: World) -> None:
        world.memory.may_read.clear()
        world.memory.broken = {"a"}
        first = world.start("a")
        await until(lambda: world.memory.num_reads == 1)
        second = world.start("b")
        await until(lambda: world.loader.counts().num_waiting_for_place == 1)
        world.memory.may_read.set()
        await second

        assert isinstance(first.exception(), AdapterUnreadable)

    run(scenario, num_places=1)


def test_a_load_that_nobody_waits_for_makes_room_for_the_next() -> None:
    async def scenario(world: World) -> None:
        world.memory.may_read.clear()
        first = world.start("a")
        await until(lambda: world.memory.num_reads == 1)
        first.cancel()
        second = world.start("b")
        await until(lambda: world.loader.counts().num_waiting_for_place == 1)
        world.memory.may_read.set()
        await second

        assert world.memory.content == {"b"}

    run(scenario, num_places=1)


def test_loads_of_others_go_on_while_a_folder_hangs() -> None:
    async def scenario(world: World) -> None:
        mount = DeadMount()
        hanging = world.start_on(mount, "a")
        await until(lambda: mount.num_asked == 1)
        await world.use("b")
        assert await world.loader.digest(lambda: Path("adapters", "c")) == "c"
        assert not hanging.done()
        mount.answers.set()
        await hanging

        assert world.memory.added == ["b", "a"]

    run(scenario)


def test_a_request_whose_files_never_answer_ends_and_later_ones_do_not_join_it() -> None:
    async def scenario(world: World) -> None:
        dead, back = DeadMount(), DeadMount()
        with pytest.raises(AdaptersBusy, match=r"did not answer within 0 s.*--lora-root"):
            await world.start_on(dead, "a")

        later = world.start_on(back, "a")
        await until(lambda: back.num_asked == 1)

        for mount in (dead, back):
            mount.answers.set()
        await asyncio.gather(later, return_exceptions=True)

    run(scenario, threads=FolderThreads(max_call_s=0.0))


def test_loads_are_refused_by_name_while_all_threads_hang() -> None:
    now_s = 0.0

    async def scenario(world: World) -> None:
        nonlocal now_s
        mount = DeadMount()
        hanging = [world.start_on(mount, "a"), world.start_on(mount, "b")]
        await until(lambda: mount.num_asked == 2)
        waiting = world.start("c")  # until the others count as hanging
        await asyncio.sleep(0.005)
        assert not waiting.done()
        now_s = 1.0
        for refused in (waiting, world.start("d")):
            with pytest.raises(AdaptersBusy, match=r"all 2 threads .* --lora-root"):
                await refused
        mount.answers.set()
        await asyncio.gather(*hanging)
        await world.use("c")

    threads = FolderThreads(2, hangs_after_s=0.001, clock=lambda: now_s)
    run(scenario, num_places=3, threads=threads)


def test_a_call_that_hangs_does_not_keep_a_node_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mount = DeadMount()

    async def hang() -> None:
        call = asyncio.ensure_future(threads.run(lambda: mount.find("a")))
        await until(lambda: mount.num_asked == 1)
        call.cancel()
        await asyncio.wait([call])
        threads.close()

    threads = FolderThreads(max_exit_s=0.0)
    asyncio.run(hang())

    assert "1 threads still wait" in caplog.text
    mount.answers.set()
    for thread in threading.enumerate():
        if thread.name == "adapters":
            thread.join(PATIENCE_S)


def test_a_forgotten_adapter_leaves_memory_after_its_last_request() -> None:
    async def scenario(world: World) -> None:
        async with world.held("a"):
            world.loader.keep("a", is_kept=False)
            async with world.held("a"):
                pass
            assert world.memory.content == {"a"}
        assert world.memory.content == set()
        world.loader.keep("a", is_kept=False)

    run(scenario)


def test_adapters_of_the_start_are_evicted_by_each_other() -> None:
    async def scenario(world: World) -> None:
        for adapter_id in "abc":
            assert world.loader.read_at_start(Path(adapter_id)) == adapter_id

        assert world.memory.content == {"b", "c"}

    run(scenario)
