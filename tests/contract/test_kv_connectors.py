"""Contract of KV connectors: the built-in tiers, and the example in docs/kv-connectors.md.

The tiers also work with a KV cache in memory of a simulated device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from threading import Event

import pytest

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockId
from baton.kv_transfer.external_kv import ExternalOrders, Load, LoadId, Store, StoreId
from baton.kv_transfer.kv_connector import KvConnector, KvConnectorContext
from baton.node.kv import connectors as kv_connectors
from baton.node.kv.connectors import load_connector
from tests.support.device_kv import DeviceMemory
from tests.support.doc_examples import write_example
from tests.support.tier_memory import BLOCK_BYTES, OwnedMemory, name_of

NUM_BLOCKS = 32
WAIT_S = 30.0


class Broken:
    def __init__(self, context: KvConnectorContext) -> None:
        raise OSError("no such shelf")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write_example("kv-connectors.md", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = {"shelf": f"{module}:Shelf", "broken": f"{__name__}:Broken"}
    found = EntryPoints(
        EntryPoint(name, value, kv_connectors.GROUP) for name, value in entries.items()
    )
    monkeypatch.setattr(kv_connectors, "entry_points", lambda group: found.select(group=group))


class ConnectorWorld:
    """A connector with KV memory, and an engine that polls it when it is woken."""

    def __init__(
        self, name: str, config: Mapping[str, object], memory: OwnedMemory | DeviceMemory
    ) -> None:
        self.memory = memory
        self.woken = Event()
        self.connector: KvConnector = load_connector(name, self.context(config))
        self.ends: Counter[int] = Counter()
        self.sources: dict[int, tuple[str | None, ...]] = {}
        self._number = 0

    def context(self, config: Mapping[str, object]) -> KvConnectorContext:
        memory = self.memory
        copies = memory.copies if isinstance(memory, DeviceMemory) else None
        return KvConnectorContext(
            address=0 if isinstance(memory, DeviceMemory) else memory.blocks.address,
            num_blocks=NUM_BLOCKS,
            block_bytes=BLOCK_BYTES,
            device="cpu" if copies is None else "cuda:0",
            device_blocks=copies,
            fingerprint="model",
            wake=self.woken.set,
            config=config,
        )

    def start_store(self, *blocks: int) -> int:
        self._number += 1
        names = tuple(map(name_of, blocks))
        store = Store(StoreId(self._number), names, tuple(map(BlockId, blocks)))
        self.connector.start(ExternalOrders(stores=(store,)))
        return self._number

    def start_load(self, blocks: Sequence[int], into: int) -> int:
        self._number += 1
        names = tuple(map(name_of, blocks))
        targets = tuple(BlockId(into + place) for place in range(len(blocks)))
        self.connector.start(ExternalOrders(loads=(Load(LoadId(self._number), names, targets),)))
        return self._number

    def wait_for(self, *numbers: int) -> None:
        while any(number not in self.ends for number in numbers):
            assert self.woken.wait(WAIT_S), "the engine was not woken"
            self.woken.clear()
            reports = self.connector.poll()
            self.ends.update([*reports.stored, *(each.load_id for each in reports.loaded)])
            self.sources |= {each.load_id: each.sources for each in reports.loaded}

    def store(self, *blocks: int) -> None:
        self.wait_for(self.start_store(*blocks))

    def load(self, blocks: Sequence[int], into: int) -> tuple[str | None, ...]:
        number = self.start_load(blocks, into)
        self.wait_for(number)
        return self.sources[number]

    def drop(self, *blocks: int) -> None:
        self.connector.start(ExternalOrders(drops=tuple(map(name_of, blocks))))

    def holds(self, block: int) -> bool:
        return self.connector.holds(name_of(block))

    def content(self) -> list[bytes]:
        return [self.memory[block] for block in range(NUM_BLOCKS)]


@pytest.fixture(
    params=[
        "tiers",
        "tiers with files",
        "tiers of a device",
        "tiers with files of a device",
        "shelf",
    ]
)
def it(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ConnectorWorld]:
    name, config = request.param, dict[str, object]()
    if name.startswith("tiers"):
        folder = str(tmp_path / "kv") if "files" in name else ""
        config = {"host_bytes": 16 * BLOCK_BYTES, "folder": folder, "folder_bytes": 1 << 20}
    memory = DeviceMemory if name.endswith("device") else OwnedMemory
    world = ConnectorWorld(name.partition(" ")[0], config, memory(NUM_BLOCKS))
    with world.connector:
        yield world
    world.memory.check()


def test_stored_blocks_are_held_and_loaded_into_their_targets_alone(it: ConnectorWorld) -> None:
    it.store(1, 2, 3)
    assert all(map(it.holds, (1, 2, 3)))
    before = it.content()

    sources = it.load([3, 1], into=8)

    assert None not in sources
    expected = [*before[:8], before[3], before[1], *before[10:]]
    assert it.content() == expected


def test_an_unstored_block_has_no_source(it: ConnectorWorld) -> None:
    it.store(1)

    assert not it.holds(2)
    first, second = it.load([1, 2], into=8)
    assert first is not None
    assert second is None
    assert it.memory[8] == it.memory[1]


def test_a_copy_does_not_change_with_its_block(it: ConnectorWorld) -> None:
    content = it.memory[1]
    it.store(1)
    it.memory.wipe(1)

    assert it.load([1], into=8) != (None,)
    assert it.memory[8] == content


def test_every_load_and_store_ends_once(it: ConnectorWorld) -> None:
    it.store(1, 2)
    numbers = [it.start_load([1, 2], into=16 + 2 * place) for place in range(8)]
    numbers += [it.start_store(block) for block in range(3, 7)]

    it.wait_for(*numbers)
    it.store(7)  # a later order, so that a second end would have been reported

    assert set(it.ends.values()) == {1}
    assert set(it.ends) >= set(numbers)


def test_dropped_blocks_are_neither_reported_nor_loaded(it: ConnectorWorld) -> None:
    it.store(1, 2)

    it.drop(1)

    assert not it.holds(1)
    assert it.load([1, 2], into=8)[0] is None
    assert it.holds(2)


def test_a_drop_reaches_stores_in_progress(it: ConnectorWorld) -> None:
    number = it.start_store(1, 2)
    it.drop(1)
    it.wait_for(number)
    it.store(3)  # the connector is past the drop

    assert not it.holds(1)
    assert it.load([1], into=8) == (None,)


def test_a_cleared_connector_is_empty_and_keeps_working(it: ConnectorWorld) -> None:
    it.store(1)
    number = it.start_store(2)

    it.connector.clear()

    assert not it.holds(1)
    it.wait_for(number)
    assert not it.holds(2)
    assert it.load([1, 2], into=8) == (None, None)
    it.store(3)
    assert it.load([3], into=8) != (None,)


def test_a_load_has_an_estimate(it: ConnectorWorld) -> None:
    it.store(1, 2)

    estimate_s = it.connector.load_s([name_of(1), name_of(2)])

    assert 0.0 <= estimate_s < float("inf")


def test_orders_in_progress_do_not_outlive_the_connector(tmp_path: Path) -> None:
    config = {"host_bytes": 16 * BLOCK_BYTES, "folder": "", "folder_bytes": 0}
    for name, settings, memory in (
        ("tiers", config, OwnedMemory(NUM_BLOCKS)),
        ("tiers", config, DeviceMemory(NUM_BLOCKS)),
        ("shelf", {}, OwnedMemory(NUM_BLOCKS)),
    ):
        world = ConnectorWorld(name, settings, memory)
        with world.connector:
            world.store(1)
            world.start_load([1] * 8, into=8)
        before = world.content()
        assert before[8:16] == [before[1]] * 8, "the load was still going on"


@pytest.mark.parametrize(
    ("name", "config", "word"),
    [
        ("absent", {}, "installed: broken, shelf, tiers"),
        ("broken", {}, "no such shelf"),
        ("tiers", {"host_bytes": 1}, "a block takes"),
        ("tiers", {"host_byte": 1}, "unexpected keyword argument 'host_byte'"),
    ],
)
def test_a_connector_that_cannot_be_created_is_named(
    name: str, config: dict[str, object], word: str
) -> None:
    with pytest.raises(InvalidConfig, match=word):
        ConnectorWorld(name, config, OwnedMemory(NUM_BLOCKS))


def test_a_connector_that_needs_the_cpu_refuses_a_device() -> None:
    with pytest.raises(InvalidConfig, match="the shelf copies blocks on the CPU only"):
        ConnectorWorld("shelf", {}, DeviceMemory(NUM_BLOCKS))
