"""Adapters that nodes report, and the one that each name means. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.ids import ModelVariant
from baton.rpc.adapters import NO_ADAPTERS, AdapterNames, NameOrder, NodeAdapters


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Adapters of one node."""

    model: str
    reported: NodeAdapters = NO_ADAPTERS
    orders: Mapping[str, NameOrder] = field(default_factory=dict)  # by name
    in_memory: frozenset[str] = frozenset()  # ids
    known: frozenset[str] = frozenset()  # ids, also of those that are not in memory


NO_REPORT = AdapterReport("")


class ClusterAdapters:
    """Reports of all nodes by address, and the last order about each name of a model.

    Orders of operators are numbered, and the last one of a name holds, whatever nodes have: those
    that report an older one lack it. A router knows the orders that nodes have reported to it, and
    its own, also after the last node with them is gone.

    Names that nodes have from their start, by `--lora`, are those of their nodes alone, and older
    than any order. Such a name means the adapter that most nodes have under it.
    """

    def __init__(self) -> None:
        self.version = 0  # changes with nodes and names
        self.variants: dict[str, ModelVariant] = {}  # the adapter that each name means
        self._reports: dict[str, AdapterReport] = {}
        self._orders: dict[str, AdapterNames] = {}  # of operators, by model

    def at(self, address: str) -> AdapterReport:
        return self._reports.get(address, NO_REPORT)

    def join(self, address: str, model: str) -> None:
        self._orders.setdefault(model, AdapterNames())
        self._replace(address, AdapterReport(model))
        self.version += 1

    def lose(self, address: str) -> None:
        self._replace(address, NO_REPORT)
        self._reports.pop(address, None)

    def note(self, address: str, reported: NodeAdapters) -> bool:
        """Record what a node has. Return whether its names have changed."""
        is_changed = self._note(address, reported)
        self.version += is_changed
        return is_changed

    def note_sent(self, address: str, orders: Sequence[NameOrder]) -> None:
        """Record orders that a node has taken, before it reports them."""
        before = self.at(address)
        names = {**before.orders, **{order.name: order for order in orders}}
        self._note(address, NodeAdapters(tuple(names.values()), before.reported.in_memory))

    def merge(self, model: str, order: NameOrder) -> None:
        """Note an order for all nodes of a model."""
        if order.number and self._orders[model].merge(order):
            self.version += 1
        self._resolve(order.name)

    def next_number(self, name: str, now_ns: int) -> int:
        """Return a number for an order, higher than those of all orders about the name.

        Clocks decide between routers only while none has heard of the other's order.
        """
        last = [names.orders.get(name, NameOrder(name)) for names in self._orders.values()]
        return max(now_ns, 1 + max((order.number for order in last), default=0))

    def lacking(self, address: str) -> list[NameOrder]:
        """Return the orders that a node does not have."""
        report = self.at(address)
        names = self._orders.get(report.model)
        return [
            order
            for order in (names.orders.values() if names else ())
            if order.rank > report.orders.get(order.name, NameOrder(order.name)).rank
        ]

    def num_named(self, model: str) -> int:
        return len(self._orders[model].named)

    def nodes_with(self, name: str) -> int:
        """Return the number of nodes that have an adapter under a name."""
        own = [report.orders.get(name) for report in self._reports.values()]
        return sum(order is not None and order.adapter is not None for order in own)

    def _note(self, address: str, reported: NodeAdapters) -> bool:
        in_memory = frozenset(each.id for each in reported.in_memory)
        report = AdapterReport(
            self.at(address).model,
            reported,
            {order.name: order for order in reported.names},
            in_memory,
            in_memory | {adapter.id for adapter in reported.named},
        )
        return self._replace(address, report)

    def _replace(self, address: str, report: AdapterReport) -> bool:
        before = self.at(address)
        self._reports[address] = report
        changed = {order.name for _, order in before.orders.items() ^ report.orders.items()}
        for name in changed:
            self.merge(report.model, report.orders.get(name) or NameOrder(name))
        return bool(changed)

    def _resolve(self, name: str) -> None:
        """Find what a name means. If it has a meaning in several models, the last order holds."""
        found = [(self._meaning(model, name), model) for model in self._orders]
        meant = [(order.rank, model, order.adapter) for order, model in found if order.adapter]
        self.variants.pop(name, None)
        if meant:
            _, model, adapter = max(meant)
            self.variants[name] = ModelVariant(model, adapter)

    def _meaning(self, model: str, name: str) -> NameOrder:
        order = self._orders[model].orders.get(name)
        if order is not None:
            return order
        given = [
            given_order.adapter
            for report in self._reports.values()
            if report.model == model
            # A removal that is no longer remembered here can still be at nodes.
            if (given_order := report.orders.get(name)) and given_order.adapter is not None
        ]
        counts = Counter(adapter.id for adapter in given)
        # Nodes that lack the adapter can read it only with a path.
        adapter = max(given, key=lambda each: (counts[each.id], each.id, each.path), default=None)
        return NameOrder(name, 0, adapter)
