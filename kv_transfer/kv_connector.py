"""Public interface of KV connectors: KV caches outside the engine, from any package.

A package registers a factory under the entry point group `baton.kv_connectors`; a node loads it by
name (`--kv-connector`). The tiers in host memory and files are the built-in one. A complete example
is in docs/kv-connectors.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.core.ids import BlockName
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.external_kv import (
    ExternalKv,
    ExternalOrders,
    ExternalReports,
    Loaded,
    LoadId,
    StoreId,
)
from baton.kv_transfer.tiers.kv_access import DeviceBlocks
from baton.kv_transfer.types import KvOrders, KvReports

log = logging.getLogger(__name__)
FURTHER = "further errors like this are only counted"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class KvConnectorContext:
    """KV memory of a node, and how to work with it."""

    address: int  # of block 0; the others follow it without gaps
    num_blocks: int
    block_bytes: int
    device: str  # "cpu", or that of the memory at `address`
    # Copies between the blocks and host memory; None: the CPU can access the blocks.
    device_blocks: DeviceBlocks | None
    # Equal on all nodes whose blocks of one name have the same bytes. Keep others apart.
    fingerprint: str
    wake: Callable[[], None]  # lets the engine poll soon; from any thread
    config: Mapping[str, object]  # the object in kv-connector-config
    spare_bytes: int = 0  # of the node's part of host memory, which others share, besides the KV


class KvConnector(ExternalKv, AbstractContextManager["KvConnector", None], Protocol):
    """A KV cache outside the engine that a node uses within a `with` block.

    The block begins before the first order and ends after the last poll. A connector ends its
    threads then, so that nothing accesses the KV memory any more. When a load or a store has ended,
    it wakes the engine, which then polls. Each load and each store must end: a cache that does not
    know reports it as failed.
    """

    def start(self, orders: ExternalOrders) -> None: ...

    def poll(self) -> ExternalReports: ...


# Raises errors.InvalidConfig if the connector cannot work, such as for unknown keys in `config`.
KvConnectorFactory = Callable[[KvConnectorContext], KvConnector]


class GuardedConnector(KvDriver):
    """Implements ExternalKv by a connector, and drives it: its errors cost only its hits.

    An exception ends the loads and stores that it concerns as failed; the engine goes on. A
    connector that could not drop or clear blocks may hold wrong KV, so it is not used any more.
    """

    def __init__(self, name: str, connector: KvConnector) -> None:
        self.connector = connector
        self.num_errors = 0
        self._name = name
        self._is_usable = True
        self._logged: set[str] = set()
        self._num_names: dict[LoadId, int] = {}  # of loads in progress
        self._storing: set[StoreId] = set()
        self._loaded: list[Loaded] = []  # ended since the last poll
        self._stored: list[StoreId] = []

    def __enter__(self) -> GuardedConnector:
        self.connector.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(None, self.connector.__exit__, None, None, None)

    def holds(self, name: BlockName) -> bool:
        return self._is_usable and bool(self._call(False, self.connector.holds, name))

    def load_s(self, names: Sequence[BlockName]) -> float:
        return self._call(float("inf"), self._load_s, names)

    def start(self, orders: KvOrders, now: float) -> None:
        external = orders.external
        self._num_names |= {load.load_id: len(load.names) for load in external.loads}
        self._storing |= {store.store_id for store in external.stores}
        if not (self._is_usable and self._call(False, self._start, external)):
            self._is_usable = self._is_usable and not external.drops
            self._fail(external)

    def poll(self, now: float) -> KvReports:
        self._call(None, self._poll)
        reports = ExternalReports(tuple(self._loaded), tuple(self._stored))
        self._loaded.clear()
        self._stored.clear()
        return KvReports(external=reports)

    def clear(self, tiers: Collection[str] | None = None) -> Mapping[str, int]:
        cleared = self._call(None, self.connector.clear, tiers) if self._is_usable else {}
        self._is_usable = self._is_usable and cleared is not None
        return cleared or {}

    # --- calls of the connector, which may raise ------------------------------------------------

    def _load_s(self, names: Sequence[BlockName]) -> float:
        return float(self.connector.load_s(names))

    def _start(self, orders: ExternalOrders) -> bool:
        self.connector.start(orders)
        return True

    def _poll(self) -> None:
        self._take(self.connector.poll())

    def _call(self, failed: Result, method: Callable[..., Result], *given: object) -> Result:
        """Return the result of the method, or `failed` if it raises."""
        try:
            return method(*given)
        except Exception:
            if self._is_first(method.__name__):
                log.exception("KV connector %s failed; %s", self._name, FURTHER)
            return failed

    # --- reports -------------------------------------------------------------------------------

    def _fail(self, orders: ExternalOrders) -> None:
        """End the loads and stores of these orders."""
        for load in orders.loads:
            num_names = self._num_names.pop(load.load_id)
            self._loaded.append(Loaded(load.load_id, (None,) * num_names))
        for store in orders.stores:
            self._storing.remove(store.store_id)
            self._stored.append(store.store_id)

    def _take(self, reports: ExternalReports) -> None:
        """Take the reports about loads and stores in progress, each once."""
        for store_id in reports.stored:
            if store_id in self._storing:
                self._storing.remove(store_id)
                self._stored.append(store_id)
            else:
                self._reject(f"store {store_id} is not in progress")
        for loaded in reports.loaded:
            self._take_loaded(loaded)

    def _take_loaded(self, loaded: Loaded) -> None:
        num_names = self._num_names.pop(loaded.load_id, None)
        if num_names is None:
            self._reject(f"{loaded} is not in progress")
            return
        if len(loaded.sources) != num_names:
            self._reject(f"{loaded} must have {num_names} sources")
            loaded = Loaded(loaded.load_id, (None,) * num_names)
        self._loaded.append(loaded)

    def _reject(self, reason: str) -> None:
        if self._is_first("report"):
            log.error("KV connector %s: %s; %s", self._name, reason, FURTHER)

    def _is_first(self, kind: str) -> bool:
        """Count an error. Returns whether it is the first of its kind."""
        self.num_errors += 1
        is_first = kind not in self._logged
        self._logged.add(kind)
        return is_first
