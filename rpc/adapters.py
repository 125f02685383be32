"""Adapters of nodes: the last order about each name, and what nodes report. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.ids import NO_ADAPTER, AdapterRef
from baton.rpc.messages.mapper import Mapper
from baton.v1 import node_pb2

# Of a model. A report of all of them keeps the asyncio thread of a node busy for about 20 ms.
MAX_NAMES = 2_000
MAX_REMOVED = 1_024  # names that are remembered


class NameOrder(NamedTuple):
    """Meaning of a name by an order about it."""

    name: str
    number: int = 0  # the highest holds; 0: the name was given at a node's start
    adapter: AdapterRef | None = None  # None: the name was removed

    @property
    def rank(self) -> tuple[int, str, str]:
        """Place among the orders of the name, unlike that of any other order."""
        adapter = self.adapter or NO_ADAPTER
        return self.number, adapter.id, adapter.path


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in a node's memory."""

    id: str
    path: str = ""  # below the node's root; empty: it is elsewhere
    num_bytes: int = 0
    # In progress. Sent along with other changes, as it changes with each request.
    num_requests: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class NodeAdapters:
    """Adapters of a node: names, also those that were removed, and what is in memory."""

    names: tuple[NameOrder, ...] = ()
    in_memory: tuple[LoadedAdapter, ...] = ()

    @property
    def named(self) -> tuple[AdapterRef, ...]:
        """The adapters that have a name."""
        return tuple(order.adapter for order in self.names if order.adapter is not None)


NO_ADAPTERS = NodeAdapters()
ADAPTER = Mapper(AdapterRef, node_pb2.Adapter)
ADAPTERS = Mapper(NodeAdapters, node_pb2.NodeAdapters)
ORDER = Mapper(NameOrder, node_pb2.NameOrder)


class AdapterNames:
    """The last order about each name. All that merge the same orders hold the same names.

    Names that were removed are remembered, the last of them, so that no older order revives one.
    """

    def __init__(self) -> None:
        self.orders: dict[str, NameOrder] = {}
        self._removed: dict[str, NameOrder] = {}

    def find(self, name: str) -> AdapterRef | None:
        order = self.orders.get(name)
        return None if order is None else order.adapter

    @property
    def named(self) -> tuple[AdapterRef, ...]:
        """The adapters that have a name. For any thread."""
        return NodeAdapters(tuple(self.orders.values())).named

    def merge(self, order: NameOrder) -> bool:
        """Note an order. Return whether it is the last one of its name."""
        last = self.orders.get(order.name)
        if last is not None and order.rank <= last.rank:
            return False
        self.orders[order.name] = order
        self._removed.pop(order.name, None)
        if order.adapter is None:
            self._removed[order.name] = order
            if len(self._removed) > MAX_REMOVED:
                oldest = min(self._removed.values(), key=lambda each: (each.number, each.name))
                del self._removed[oldest.name], self.orders[oldest.name]
        return True
