"""Errors of a KV connector: they end loads and stores, and never reach the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from baton.core.ids import BlockId, BlockName
from baton.kv_transfer.external_kv import (
    ExternalOrders,
    ExternalReports,
    Load,
    Loaded,
    LoadId,
    Store,
    StoreId,
)
from baton.kv_transfer.kv_connector import GuardedConnector
from baton.kv_transfer.types import KvOrders

LOAD = Load(LoadId(1), (b"one", b"two"), (BlockId(1), BlockId(2)))
STORE = Store(StoreId(2), (b"three",), (BlockId(3),))
FAILED = ExternalReports((Loaded(LoadId(1), (None, None)),), (StoreId(2),))


class FlakyConnector:
    """Connector whose methods raise while they are in `failing`."""

    def __init__(self, *failing: str) -> None:
        self.failing = set(failing)
        self.orders: list[ExternalOrders] = []
        self.reports = ExternalReports()

    def _do(self, method: str) -> None:
        if method in self.failing:
            raise RuntimeError(f"{method} does not work")

    def __enter__(self) -> FlakyConnector:
        return self

    def __exit__(self, *_: object) -> None:
        self._do("exit")

    def holds(self, name: BlockName) -> bool:
        self._do("holds")
        return True

    def load_s(self, names: Sequence[BlockName]) -> float:
        self._do("load_s")
        return 0.5

    def start(self, orders: ExternalOrders) -> None:
        self._do("start")
        self.orders.append(orders)

    def poll(self) -> ExternalReports:
        self._do("poll")
        reports, self.reports = self.reports, ExternalReports()
        return reports

    def clear(self, tiers: Collection[str] | None = None) -> Mapping[str, int]:
        self._do("clear")
        return {}


def start(guard: GuardedConnector, orders: ExternalOrders) -> None:
    guard.start(KvOrders(external=orders), now=0.0)


def poll(guard: GuardedConnector) -> ExternalReports:
    return guard.poll(now=0.0).external


def guarded(*failing: str) -> tuple[GuardedConnector, FlakyConnector]:
    connector = FlakyConnector(*failing)
    return GuardedConnector("flaky", connector), connector


def test_calls_of_a_working_connector_are_passed_through() -> None:
    guard, connector = guarded()
    orders = ExternalOrders((LOAD,), (STORE,), (b"four",))
    start(guard, orders)
    connector.reports = reports = ExternalReports(
        (Loaded(LoadId(1), ("shelf", None)),), (StoreId(2),)
    )

    assert connector.orders == [orders]
    assert poll(guard) == reports
    assert guard.holds(b"one")
    assert guard.load_s([b"one"]) == 0.5
    guard.clear()
    assert guard.holds(b"one")
    assert guard.num_errors == 0


def test_a_failed_start_ends_its_loads_and_stores(caplog: pytest.LogCaptureFixture) -> None:
    guard, connector = guarded("start")

    start(guard, ExternalOrders((LOAD,), (STORE,)))

    assert poll(guard) == FAILED
    assert poll(guard) == ExternalReports()
    assert "flaky" in caplog.text
    assert "start does not work" in caplog.text
    connector.failing.clear()
    assert guard.holds(b"one")  # nothing wrong can have been kept


@pytest.mark.parametrize("kind", ["drop", "clear"])
def test_a_connector_that_may_hold_wrong_kv_is_disabled(kind: str) -> None:
    guard, connector = guarded("start", "clear")

    if kind == "drop":
        start(guard, ExternalOrders(drops=(b"one",)))
    else:
        guard.clear()

    connector.failing.clear()
    assert not guard.holds(b"two")
    start(guard, ExternalOrders((LOAD,), (STORE,)))
    assert connector.orders == []
    assert poll(guard) == FAILED
    guard.clear()
    assert not guard.holds(b"two")


def test_failed_look_ups_count_as_misses() -> None:
    guard, _ = guarded("holds", "load_s", "poll", "exit")

    assert not guard.holds(b"one")
    assert guard.load_s([b"one"]) == float("inf")
    assert poll(guard) == ExternalReports()
    with guard:
        pass
    assert guard.num_errors == 4


def test_only_the_first_error_of_a_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    guard, _ = guarded("holds")

    for _ in range(5):
        guard.holds(b"one")

    assert guard.num_errors == 5
    assert len(caplog.records) == 1


def test_inconsistent_reports_are_ignored_or_count_as_failed() -> None:
    guard, connector = guarded()
    start(guard, ExternalOrders((LOAD,), (STORE,)))
    end = Loaded(LoadId(1), ("shelf",))  # of two blocks
    unknown = Loaded(LoadId(9), ("shelf",))
    connector.reports = ExternalReports((unknown, end, end), (StoreId(2), StoreId(2), StoreId(8)))

    assert poll(guard) == FAILED
    assert guard.num_errors == 5
