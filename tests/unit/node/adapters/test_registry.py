"""Adapters by name: loads, replacements and unloads while requests use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import InvalidConfig, InvalidRequest, NamedError
from baton.core.ids import NO_ADAPTER, AdapterRef
from baton.node.adapters.config import AdapterFolder
from baton.node.adapters.loader import AdapterCounts, AdapterLoader
from baton.node.adapters.names import MAX_GENERATION, AdapterNames
from baton.node.adapters.registry import AdapterRegistry
from baton.rpc.errors import (
    AdapterExists,
    AdapterUnreadable,
    OutdatedOrder,
    TooManyAdapters,
    UnknownAdapter,
)
from baton.rpc.node_info import LoadedAdapter, NameOrder, NodeAdapters, UnloadedAdapter
from tests.support.fake_adapters import PATIENCE_S, FakeMemory, write_fake
from tests.support.waits import until

NOW_NS = 100
Scenario = Callable[[AdapterRegistry, FakeMemory], Coroutine[Any, Any, None]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for adapter_id in ("1", "2", "3"):
        write_fake(root / f"folder-{adapter_id}", adapter_id)
    return root


def run(scenario: Scenario, root: Path | None, num_places: int = 2, max_names: int = 3) -> None:
    async def timed() -> None:
        memory = FakeMemory()
        with AdapterLoader(memory, num_places) as loader:
            registry = AdapterRegistry(
                loader, root, "model", max_names=max_names, clock_ns=lambda: NOW_NS
            )
            async with asyncio.timeout(PATIENCE_S):
                await scenario(registry, memory)

    asyncio.run(timed())


def names_in(registry: AdapterRegistry) -> dict[str, str]:
    return {each.adapter.name: each.adapter.id for each in registry.report().adapters}


async def use(registry: AdapterRegistry, adapter: AdapterRef) -> None:
    async with registry.held(adapter):
        pass


def test_a_loaded_adapter_is_reported_with_its_memory_and_requests(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        adapter = await registry.load("sql", "./folder-1")
        assert adapter == AdapterRef("sql", "1", "folder-1")
        async with registry.held(adapter):
            [found] = registry.report().adapters
            assert registry.counts().num_in_use == 1

        assert found == LoadedAdapter(adapter, is_in_memory=True, num_bytes=10, generation=NOW_NS)
        assert found.num_requests == 1
        assert registry.counts() == AdapterCounts(num_named=1, num_in_memory=1, num_bytes=10)
        assert memory.num_reads == 1

    run(scenario, root)


def test_a_request_without_an_adapter_needs_none(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        await use(registry, NO_ADAPTER)
        assert memory.num_reads == 0

    run(scenario, root)


def test_a_request_brings_its_adapter_into_memory_without_a_name(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        before = registry.version
        await use(registry, AdapterRef("sql", "1", "folder-1"))

        [found] = registry.report().adapters
        assert found == LoadedAdapter(AdapterRef("", "1", "folder-1"), True, 10)
        assert registry.version > before
        assert await registry.load("sql", "folder-1") == AdapterRef("sql", "1", "folder-1")
        assert names_in(registry) == {"sql": "1"}
        assert memory.num_reads == 1

    run(scenario, root)


def test_an_adapter_without_a_name_is_not_reported_after_its_eviction(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        await use(registry, AdapterRef("a", "1", "folder-1"))
        await use(registry, AdapterRef("b", "2", "folder-2"))

        assert [each.adapter.id for each in registry.report().adapters] == ["2"]

    run(scenario, root, num_places=1)


def test_files_that_have_changed_are_refused(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        adapter = await registry.load("sql", "folder-1")
        await registry.load("other", "folder-2")  # evicts it
        write_fake(root / "folder-1", "3")
        with pytest.raises(AdapterUnreadable):
            await use(registry, adapter)
        with pytest.raises(AdapterExists):
            await registry.load("sql", "folder-1")
        await registry.load("sql", "folder-1", can_replace=True)

        assert names_in(registry) == {"sql": "3", "other": "2"}

    run(scenario, root, num_places=1)


def test_broken_files_are_an_error_of_the_request_or_of_the_operator(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        memory.broken = {"1"}
        with pytest.raises(AdapterUnreadable, match="'sql': broken"):
            await use(registry, AdapterRef("sql", "1", "folder-1"))
        with pytest.raises(InvalidRequest, match="broken"):
            await registry.load("sql", "folder-1")

        assert registry.report().adapters == ()

    run(scenario, root)


def test_a_replaced_adapter_leaves_memory_when_its_place_is_needed(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        old = await registry.load("sql", "folder-1")
        async with registry.held(old):
            new = await registry.load("sql", "folder-2", can_replace=True)
            await use(registry, new)
        write_fake(root / "folder-1", "other")
        await use(registry, old)  # a request that was on its way
        await use(registry, new)
        assert memory.content == {"1", "2"}
        assert {each.adapter.name: each.adapter.id for each in registry.report().adapters} == {
            "": "1",
            "sql": "2",
        }
        await registry.load("chat", "folder-3")

        assert memory.content == {"2", "3"}
        assert names_in(registry) == {"sql": "2", "chat": "3"}

    run(scenario, root)


def test_a_replaced_adapter_gets_its_name_back_after_its_files_have_changed(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        old = await registry.load("sql", "folder-1")
        write_fake(root / "folder-1", "new")
        await registry.load("sql", "folder-1", can_replace=True)

        assert await registry.load("sql", "folder-1", can_replace=True, adapter_id="1") == old

        await use(registry, old)
        assert (names_in(registry)["sql"], memory.num_reads) == ("1", 2)
        registry.loader.keep("1", is_kept=False)
        with pytest.raises(AdapterUnreadable, match="changed"):
            await registry.load("chat", "folder-1", adapter_id="1")

    run(scenario, root)


def test_a_replacement_that_cannot_be_read_does_not_evict_the_old_adapter(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        old = await registry.load("sql", "folder-1")
        await registry.load("chat", "folder-2")
        write_fake(root / "folder-1", "new")
        memory.broken = ("new",)

        with pytest.raises(InvalidRequest, match="broken"):
            await registry.load("sql", "folder-1", can_replace=True)

        await use(registry, old)  # its files are gone
        assert names_in(registry)["sql"] == "1"

    run(scenario, root)


def test_requests_keep_an_unloaded_adapter_to_their_end(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        adapter = await registry.load("sql", "folder-1")
        async with registry.held(adapter):
            registry.unload("sql")
            assert (names_in(registry), memory.content) == ({}, {"1"})
            await use(registry, adapter)
            assert memory.content == {"1"}
        assert memory.content == set()
        with pytest.raises(UnknownAdapter, match="'sql'"):
            registry.unload("sql")

    run(scenario, root)


def test_orders_that_come_too_late_are_refused(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        await registry.load("sql", "folder-1", generation=6)
        with pytest.raises(OutdatedOrder, match="'sql'"):
            await registry.load("sql", "folder-2", can_replace=True, generation=4)
        with pytest.raises(OutdatedOrder):
            registry.unload("sql", 4)
        await registry.load("sql", "folder-1", generation=6)  # the same again

        registry.unload("sql", 8)
        with pytest.raises(UnknownAdapter):
            registry.unload("chat", 9)
        for name in ("sql", "chat"):
            with pytest.raises(OutdatedOrder):
                await registry.load(name, "folder-1", generation=7)
        assert registry.report() == NodeAdapters(
            (), (UnloadedAdapter("sql", 8), UnloadedAdapter("chat", 9))
        )

        await registry.load("sql", "folder-2")  # without a generation it is the last
        [found] = registry.report().adapters
        assert found.generation == NOW_NS
        assert registry.report().unloaded == (UnloadedAdapter("chat", 9),)
        for generation in (-1, MAX_GENERATION + 1):
            with pytest.raises(InvalidRequest, match="clock"):
                registry.unload("sql", generation)

    run(scenario, root)


def test_orders_after_one_with_a_clock_that_was_days_ahead_are_followed(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        days_ahead = NOW_NS + 30 * 24 * 3600 * 10**9
        await registry.load("sql", "folder-1", generation=days_ahead)

        await registry.load("sql", "folder-2", can_replace=True, generation=days_ahead + 2)
        assert names_in(registry)["sql"] == "2"
        registry.unload("sql", days_ahead + 4)
        assert "sql" not in names_in(registry)

    run(scenario, root)


def test_a_load_that_is_overtaken_by_an_unload_does_not_revive_the_name(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        memory.may_read.clear()
        loading = asyncio.ensure_future(registry.load("sql", "folder-1", generation=6))
        await until(lambda: memory.num_reads)
        with pytest.raises(UnknownAdapter):
            registry.unload("sql", 8)
        memory.may_read.set()

        with pytest.raises(OutdatedOrder):
            await loading
        assert names_in(registry).keys() <= {""}

    run(scenario, root)


def test_a_limited_number_of_unloads_is_remembered() -> None:
    names = AdapterNames(max_unloaded=2)
    for generation, name in enumerate(("a", "b", "a", "c"), start=1):
        names.note(NameOrder(name, generation))

    assert [*names.unloaded.values()] == [NameOrder("a", 3), NameOrder("c", 4)]


def test_equal_adapters_share_memory_until_the_last_name_is_unloaded(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        write_fake(root / "copy", "1")
        await registry.load("a", "folder-1")
        await registry.load("b", "copy")
        await registry.load("a", "folder-1")  # the same again
        registry.unload("a")
        assert memory.content == {"1"}
        registry.unload("b")

        assert (memory.content, memory.num_reads) == (set(), 1)

    run(scenario, root)


def test_an_adapter_that_is_loaded_again_while_its_last_requests_run_stays(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        adapter = await registry.load("sql", "folder-1")
        async with registry.held(adapter):
            registry.unload("sql")
            await registry.load("sql", "folder-1")

        assert memory.content == {"1"}

    run(scenario, root)


def test_two_loads_of_one_name_do_not_replace_each_other(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        outcomes = await asyncio.gather(
            registry.load("sql", "folder-1"),
            registry.load("sql", "folder-2"),
            return_exceptions=True,
        )
        # Either folder can be read first. The other one's adapter exists already, or is older.
        [refused] = [each for each in outcomes if isinstance(each, BaseException)]
        assert isinstance(refused, AdapterExists | OutdatedOrder)
        assert [name for name in names_in(registry) if name] == ["sql"]

    run(scenario, root)


def test_adapters_of_the_start_are_read_again_from_their_folders(
    root: Path, tmp_path: Path
) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        inside, outside = root / "folder-1", write_fake(tmp_path / "outside", "9")
        registry.read_at_start([AdapterFolder("in", inside), AdapterFolder("out", outside)])
        refs = {each.adapter.name: each.adapter for each in registry.report().adapters}
        assert refs == {"in": AdapterRef("in", "1", "folder-1"), "out": AdapterRef("out", "9")}
        for adapter in (*refs.values(), *refs.values()):
            await use(registry, adapter)

        assert memory.num_reads == 6
        registry.unload("out")
        with pytest.raises(UnknownAdapter, match="names no folder"):
            await use(registry, refs["out"])
        with pytest.raises(InvalidConfig, match="name of the model"):
            registry.read_at_start([AdapterFolder("model", inside)])

    run(scenario, root, num_places=1)


@pytest.mark.parametrize("name", ["", "model", "a\nb", "x" * 257])
def test_bad_names_are_refused(root: Path, name: str) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        with pytest.raises(InvalidRequest, match="name"):
            await registry.load(name, "folder-1")

    run(scenario, root)


def test_more_names_than_the_limit_are_refused(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        for name in ("a", "b", "c"):
            await registry.load(name, "folder-1")
        with pytest.raises(TooManyAdapters, match="3 adapters"):
            await registry.load("d", "folder-1")
        await registry.load("c", "folder-2", can_replace=True)
        registry.unload("a")
        await registry.load("d", "folder-1")

    run(scenario, root, max_names=3)


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "/etc",
        "..",
        "folder-1/../../outside",
        "link",
        "files",
        "nothing",
        "a\0b",
        "x" * 513,
    ],
)
def test_paths_that_lead_elsewhere_are_refused(root: Path, path: str) -> None:
    outside = write_fake(root.parent / "outside", "9")
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    for file in outside.iterdir():
        (root / "files" / file.name).symlink_to(file)

    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        with pytest.raises(InvalidRequest) as refused:
            await registry.load("sql", path)
        assert refused.value.field == "path"
        with pytest.raises(NamedError):
            await use(registry, AdapterRef("sql", "9", path or "."))
        assert memory.num_reads == 0

    run(scenario, root)


def test_links_within_the_root_are_followed(root: Path) -> None:
    (root / "link").symlink_to(root / "folder-1")

    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        assert (await registry.load("sql", "link")).id == "1"

    run(scenario, root)


def test_without_a_root_nothing_is_loaded_later(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        with pytest.raises(InvalidRequest, match="--lora-root"):
            await registry.load("sql", "folder-1")
        with pytest.raises(UnknownAdapter, match="--lora-root"):
            await use(registry, AdapterRef("sql", "1", "folder-1"))

    run(scenario, None)
