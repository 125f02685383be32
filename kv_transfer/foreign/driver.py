"""Driver of the KV that is read from servers that are not Baton's."""

from __future__ import annotations

from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.foreign.types import ForeignReader
from baton.kv_transfer.types import KvOrders, KvReports


class ForeignDriver(KvDriver):
    """Drives pulls from foreign servers."""

    def __init__(self, reader: ForeignReader) -> None:
        self._reader = reader

    def start(self, orders: KvOrders, now: float) -> None:
        self._reader.start(orders.foreign)

    def poll(self, now: float) -> KvReports:
        return KvReports(foreign=self._reader.poll())
