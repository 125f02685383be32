"""Adapters by name: loads, replacements and unloads while requests use them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import InvalidConfig, InvalidRequest, NamedError
from baton.core.ids import NO_ADAPTER, AdapterRef
from baton.node.adapters import registry as registry_module
from baton.node.adapters.config import AdapterFolder
from baton.node.adapters.loader import AdapterCounts, AdapterLoader
from baton.node.adapters.registry import AdapterRegistry
from baton.rpc import adapters
from baton.rpc.adapters import AdapterNames, LoadedAdapter, NameOrder, NodeAdapters
from baton.rpc.errors import AdapterUnreadable, TooManyAdapters
from tests.support.fake_adapters import PATIENCE_S, FakeMemory, write_fake

NUMBERS = itertools.count(100)  # of orders
Scenario = Callable[[AdapterRegistry, FakeMemory], Coroutine[Any, Any, None]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for adapter_id in ("1", "2", "3"):
        write_fake(root / f"folder-{adapter_id}", adapter_id)
    return root


def run(scenario: Scenario, root: Path | None, num_places: int = 2) -> None:
    async def timed() -> None:
        memory = FakeMemory()
        with AdapterLoader(memory, num_places) as loader:
            registry = AdapterRegistry(loader, root, "model")
            async with asyncio.timeout(PATIENCE_S):
                await scenario(registry, memory)

    asyncio.run(timed())


def names_in(registry: AdapterRegistry) -> dict[str, str]:
    return {adapter.name: adapter.id for adapter in registry.report().named}


async def load(registry: AdapterRegistry, name: str, path: str, number: int = 0) -> AdapterRef:
    """Read an adapter and give it the name, by default as the last order."""
    adapter = await registry.read(path, name)
    registry.set_names([NameOrder(name, number or next(NUMBERS), adapter)])
    return adapter


def unload(registry: AdapterRegistry, name: str, number: int = 0) -> None:
    registry.set_names([NameOrder(name, number or next(NUMBERS))])


async def use(registry: AdapterRegistry, adapter: AdapterRef) -> None:
    async with registry.held(adapter):
        pass


def test_a_loaded_adapter_is_reported_with_its_memory_and_requests(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        adapter = await load(registry, "sql", "./folder-1")
        assert adapter == AdapterRef("sql", "1", "folder-1")
        async with registry.held(adapter):
            [found] = registry.report().in_memory
            assert registry.counts().num_in_use == 1

        assert found == LoadedAdapter("1", "folder-1", num_bytes=10)
        assert found.num_requests == 1
        assert registry.report().named == (adapter,)
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

        assert registry.report() == NodeAdapters((), (LoadedAdapter("1", "folder-1", 10),))
        assert registry.version > before
        assert await load(registry, "sql", "folder-1") == AdapterRef("sql", "1", "folder-1")
        assert names_in(registry) == {"sql": "1"}
        assert memory.num_reads == 1

    run(scenario, root)


def test_an_adapter_without_a_name_is_not_reported_after_its_eviction(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        await use(registry, AdapterRef("a", "1", "folder-1"))
        await use(registry, AdapterRef("b", "2", "folder-2"))

        assert [each.id for each in registry.report().in_memory] == ["2"]

    run(scenario, root, num_places=1)


def test_files_that_have_changed_are_refused(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        adapter = await load(registry, "sql", "folder-1")
        await load(registry, "other", "folder-2")  # evicts it
        write_fake(root / "folder-1", "3")
        with pytest.raises(AdapterUnreadable):
            await use(registry, adapter)
        await load(registry, "sql", "folder-1")

        assert names_in(registry) == {"sql": "3", "other": "2"}

    run(scenario, root, num_places=1)


def test_broken_files_are_an_error_of_the_request_or_of_the_operator(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        memory.broken = {"1"}
        with pytest.raises(AdapterUnreadable, match="broken"):
            await use(registry, AdapterRef("sql", "1", "folder-1"))
        with pytest.raises(InvalidRequest, match="broken"):
            await load(registry, "sql", "folder-1")

        assert registry.report() == NodeAdapters()

    run(scenario, root)


def test_a_replaced_adapter_leaves_memory_when_its_place_is_needed(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        old = await load(registry, "sql", "folder-1")
        async with registry.held(old):
            new = await load(registry, "sql", "folder-2")
            await use(registry, new)
        write_fake(root / "folder-1", "other")
        await use(registry, old)  # a request that was on its way
        await use(registry, new)
        assert memory.content == {"1", "2"}
        assert names_in(registry) == {"sql": "2"}
        await load(registry, "chat", "folder-3")

        assert memory.content == {"2", "3"}
        assert names_in(registry) == {"sql": "2", "chat": "3"}

    run(scenario, root)


def test_a_replacement_that_cannot_be_read_does_not_evict_the_old_adapter(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        old = await load(registry, "sql", "folder-1")
        await load(registry, "chat", "folder-2")
        write_fake(root / "folder-1", "new")
        memory.broken = ("new",)

        with pytest.raises(InvalidRequest, match="broken"):
            await load(registry, "sql", "folder-1")

        await use(registry, old)  # its files are gone
        assert names_in(registry)["sql"] == "1"

    run(scenario, root)


def test_replacements_at_once_do_not_wait_for_each_others_places(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        await load(registry, "sql", "folder-1")
        await load(registry, "chat", "folder-2")
        for path in ("folder-1", "folder-2"):
            write_fake(root / path, f"new{path}".replace("-", ""))

        await asyncio.gather(load(registry, "sql", "folder-1"), load(registry, "chat", "folder-2"))

        assert names_in(registry) == {"sql": "newfolder1", "chat": "newfolder2"}

    run(scenario, root)


def test_requests_keep_an_unloaded_adapter_to_their_end(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        adapter = await load(registry, "sql", "folder-1")
        async with registry.held(adapter):
            unload(registry, "sql")
            assert (names_in(registry), memory.content) == ({}, {"1"})
            await use(registry, adapter)
            assert memory.content == {"1"}
        assert memory.content == set()

    run(scenario, root)


def test_orders_that_come_too_late_change_nothing(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        first = await load(registry, "sql", "folder-1", 6)
        await load(registry, "sql", "folder-2", 4)
        unload(registry, "sql", 5)
        registry.set_names([NameOrder("sql", 6, first)])  # the same again
        assert names_in(registry) == {"sql": "1"}

        unload(registry, "sql", 8)
        unload(registry, "chat", 9)  # which may be on its way
        for name in ("sql", "chat"):
            await load(registry, name, "folder-1", 7)
        assert registry.report().names == (NameOrder("sql", 8), NameOrder("chat", 9))

        await load(registry, "sql", "folder-2", 9)
        assert names_in(registry) == {"sql": "2"}

    run(scenario, root)


def test_of_unlike_orders_with_one_number_the_same_holds_on_all_nodes(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        refs = [await registry.read(path, "sql") for path in ("folder-1", "folder-2")]
        orders = [NameOrder("sql", 6, adapter) for adapter in (*refs, None)]
        held = []
        for mixed in itertools.permutations(orders):
            other = AdapterRegistry(registry.loader, root, "model")
            other.set_names(mixed)
            held.append(names_in(other))

        assert held == [{"sql": "2"}] * len(held)

    run(scenario, root)


def test_a_number_days_ahead_does_not_block_later_orders(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        wrong = 2**61
        await load(registry, "sql", "folder-1", wrong)
        unload(registry, "sql", wrong + 1)
        await load(registry, "sql", "folder-2", wrong + 2)

        assert names_in(registry) == {"sql": "2"}

    run(scenario, root)


@pytest.mark.parametrize(
    "order",
    [
        NameOrder("model", 1),
        *(NameOrder("sql", number) for number in (-1, 0, 2**62 + 1)),
        NameOrder("sql", 1, AdapterRef("sql", "")),
        NameOrder("sql", 1, AdapterRef("sql", "x" * 129)),
        NameOrder("sql", 1, AdapterRef("sql", "a\nb")),
        NameOrder("sql", 1, AdapterRef("chat", "1")),
        NameOrder("sql", 1, AdapterRef("sql", "1", "../folder-1")),
        *(NameOrder(name, 1) for name in ("", "a\nb", "x" * 257)),
    ],
)
def test_bad_orders_are_refused_with_all_that_come_with_them(root: Path, order: NameOrder) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        good = NameOrder("good", 1, AdapterRef("good", "1", "folder-1"))
        with pytest.raises(InvalidRequest):
            registry.set_names([good, order])
        assert names_in(registry) == {}

    run(scenario, root)


def test_the_last_names_that_were_removed_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_REMOVED", 2)
    names = AdapterNames()
    for number, name in enumerate(("a", "b", "a", "c"), start=1):
        names.merge(NameOrder(name, number))

    assert {*names.orders.values()} == {NameOrder("a", 3), NameOrder("c", 4)}


def test_equal_adapters_share_memory_until_the_last_name_is_unloaded(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        write_fake(root / "copy", "1")
        await load(registry, "a", "folder-1")
        await load(registry, "b", "copy")
        await load(registry, "a", "folder-1")  # the same again
        unload(registry, "a")
        assert memory.content == {"1"}
        unload(registry, "b")

        assert (memory.content, memory.num_reads) == (set(), 1)

    run(scenario, root)


def test_an_adapter_that_is_loaded_again_while_its_last_requests_run_stays(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        adapter = await load(registry, "sql", "folder-1")
        async with registry.held(adapter):
            unload(registry, "sql")
            await load(registry, "sql", "folder-1")

        assert memory.content == {"1"}

    run(scenario, root)


def test_adapters_of_the_start_are_read_again_from_their_folders(
    root: Path, tmp_path: Path
) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        inside, outside = root / "folder-1", write_fake(tmp_path / "outside", "9")
        registry.read_at_start([AdapterFolder("in", inside), AdapterFolder("out", outside)])
        refs = {adapter.name: adapter for adapter in registry.report().named}
        assert refs == {"in": AdapterRef("in", "1", "folder-1"), "out": AdapterRef("out", "9")}
        for adapter in (*refs.values(), *refs.values()):
            await use(registry, adapter)

        assert memory.num_reads == 6
        with pytest.raises(AdapterUnreadable, match="names no folder"):
            await use(registry, AdapterRef("other", "8"))
        with pytest.raises(InvalidConfig, match="name of the model"):
            registry.read_at_start([AdapterFolder("model", inside)])

    run(scenario, root, num_places=1)


def test_more_names_than_the_limit_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_NAMES", 3)

    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        for name in ("a", "b", "c"):
            await load(registry, name, "folder-1")
        with pytest.raises(TooManyAdapters, match="takes 3 names"):
            await load(registry, "d", "folder-1")
        await load(registry, "c", "folder-2")
        unload(registry, "a")
        new = await load(registry, "d", "folder-1")
        orders = [NameOrder("e", 200, replace(new, name="e")), NameOrder("d", 201)]
        registry.set_names(orders)
        assert names_in(registry).keys() == {"b", "c", "e"}

    run(scenario, root)


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
            await registry.read(path, "sql")
        assert refused.value.field == "path"
        with pytest.raises(NamedError):
            await use(registry, AdapterRef("sql", "9", path or "."))
        assert memory.num_reads == 0

    run(scenario, root)


def test_links_within_the_root_are_followed(root: Path) -> None:
    (root / "link").symlink_to(root / "folder-1")

    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        assert (await registry.read("link", "sql")).id == "1"

    run(scenario, root)


def test_without_a_root_nothing_is_loaded_later(root: Path) -> None:
    async def scenario(registry: AdapterRegistry, memory: FakeMemory) -> None:
        with pytest.raises(InvalidRequest, match="--lora-root"):
            await load(registry, "sql", "folder-1")
        with pytest.raises(AdapterUnreadable, match="--lora-root"):
            await use(registry, AdapterRef("sql", "1", "folder-1"))

    run(scenario, None)
