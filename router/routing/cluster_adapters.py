"""Adapters that nodes report, and the one that a name means where nodes differ. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.ids import AdapterRef, ModelVariant
from baton.rpc.node_info import NO_ADAPTERS, NameOrder, NodeAdapters


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Adapters of one node."""

    model: str
    reported: NodeAdapters = NO_ADAPTERS
    orders: Mapping[str, NameOrder] = field(default_factory=dict)  # the node's last, by name
    known: frozenset[str] = frozenset()  # ids, also of those without a name
    in_memory: frozenset[str] = frozenset()

    def adapter(self, name: str) -> AdapterRef | None:
        """Return what the node has under a name."""
        order = self.orders.get(name)
        return None if order is None else order.adapter


NO_REPORT = AdapterReport("")
MAX_PAST_NAMES = 4096  # that no node has at present; those of the last orders are remembered


@dataclass(slots=True)
class NameRecord:
    """Nodes of one model that have a name, the last order about it, and what it means there."""

    last: NameOrder
    # What each node has, by address, and the number of the node's first report of it.
    owners: dict[str, tuple[NameOrder, int]] = field(default_factory=dict)
    meaning: AdapterRef | None = None
    rank: tuple[int, int, int] = (0, 0, 0)  # among models: the highest has the name

    @property
    def is_unloaded(self) -> bool:
        return self.last.generation > 0 and self.last.adapter is None

    def note(self, order: NameOrder) -> None:
        if order.rank > self.last.rank:
            self.last = order

    def resolve(self) -> None:
        """Find what the name means: the last order, while a node has the name."""
        self.meaning = None
        if not self.owners or self.is_unloaded:
            return
        adapter_id, newest = self.last.adapter_id, 0
        if not self.last.generation:
            adapter_id, newest = self._resolve_starts()
        owned = (order.adapter for order, _ in self.owners.values())
        refs = (each for each in owned if each is not None and each.id == adapter_id)
        # Nodes that lack the adapter can read it only with a path.
        self.meaning = max(refs, key=lambda each: each.path, default=self.last.adapter)
        self.rank = self.last.generation, len(self.owners), newest

    def _resolve_starts(self) -> tuple[str, int]:
        """Return the id of an adapter of nodes' starts, and the last first report of any."""
        first: dict[str, int] = {}  # reports, by id
        for order, number in self.owners.values():
            first[order.adapter_id] = min(number, first.get(order.adapter_id, number))
        counts = Counter(order.adapter_id for order, _ in self.owners.values())
        adapter_id = max(counts, key=lambda each: (counts[each], first[each]))
        return adapter_id, max(first.values())

    def order_for(self, address: str) -> NameOrder | None:
        """Return the order that a node has missed."""
        name, generation = self.last.name, self.last.generation
        own = self.owners.get(address)
        if own is not None and (own[0].rank >= self.last.rank or not generation):
            return None
        if self.is_unloaded:
            return None if own is None else NameOrder(name, generation)
        can_load = self.meaning is not None and self.meaning.path
        return NameOrder(name, generation, self.meaning) if can_load else None


class ClusterAdapters:
    """Reports of all nodes by address, and the adapters that names mean.

    Orders of operators are numbered: nodes report the last one of each name. Where nodes differ, a
    name means the adapter of the last order, whatever the others have; after an unload it means
    nothing, although a node may still have it. Adapters that nodes have from their start, by
    `--lora`, are older than any order; of these, a name means the one that most nodes have, or else
    the one that was reported last for the first time.

    Orders outlive the last node that has the name, so a node that returns with an older one does
    not revive it.
    """

    def __init__(self) -> None:
        self.version = 0  # changes with names and orders
        self.variants: dict[str, ModelVariant] = {}  # the adapter that each name means
        self._reports: dict[str, AdapterReport] = {}
        self._num_reported = self._last_generation = 0
        self._names: dict[str, dict[str, NameRecord]] = {}  # by name and model
        self._past: OrderedDict[tuple[str, str], None] = OrderedDict()  # lost last at the end

    def at(self, address: str) -> AdapterReport:
        return self._reports.get(address, NO_REPORT)

    def has_report_of(self, address: str) -> bool:
        return self.at(address).reported is not NO_ADAPTERS

    def join(self, address: str, model: str) -> None:
        self._replace(address, AdapterReport(model))

    def lose(self, address: str) -> None:
        self._replace(address, NO_REPORT)
        self._reports.pop(address, None)

    def note(self, address: str, reported: NodeAdapters) -> bool:
        """Record what a node has. Return whether it has gained or lost adapters."""
        model = self._reports[address].model
        ids = frozenset(each.adapter.id for each in reported.adapters)
        in_memory = frozenset(each.adapter.id for each in reported.adapters if each.is_in_memory)
        report = AdapterReport(model, reported, reported.orders(), ids, in_memory)
        return self._replace(address, report)

    def next_generation(self, name: str, now_ns: int) -> int:
        """Return a generation for an order, higher than all that nodes have reported of its name.

        It is even; the odd one above it is for undoing the order. Other names do not count: a node
        whose clock is days ahead must not have all orders refused.
        """
        self._last_generation = max(now_ns, self._last_generation + 2) & ~1
        records = self._names.get(name, {}).values()
        last = max((record.last.generation for record in records), default=0)
        return max(self._last_generation, last + 2) & ~1

    def note_unload(self, model: str, name: str, generation: int) -> None:
        """Record an unload that is sent to all nodes of a model."""
        self._record(model, name).note(NameOrder(name, generation))
        self._resolve(name)
        self.version += 1

    def missed_by(self, address: str, *, is_joining: bool) -> list[NameOrder]:
        """Return the orders whose names are older on a node, or which it lacks when it joins.

        A node that lacks a name later has been ordered to.
        """
        report = self.at(address)
        names = self._names if is_joining else filter(report.adapter, report.orders)
        records = [self._names.get(name, {}).get(report.model) for name in names]
        orders = [record.order_for(address) for record in records if record is not None]
        return [order for order in orders if order is not None]

    def missed_order(self, address: str, name: str) -> NameOrder | None:
        record = self._names.get(name, {}).get(self.at(address).model)
        return None if record is None else record.order_for(address)

    def _replace(self, address: str, report: AdapterReport) -> bool:
        before = self.at(address)
        self._reports[address] = report
        names = before.orders.keys() | report.orders.keys()
        changed = [name for name in names if before.orders.get(name) != report.orders.get(name)]
        for name in changed:
            had = self._take(address, before.model, name)
            order = report.orders.get(name)
            if order is not None:
                self._note(address, report.model, order, had)
            self._resolve(name)
        self.version += bool(changed)
        return bool(changed)

    def _take(self, address: str, model: str, name: str) -> tuple[NameOrder, int] | None:
        record = self._names.get(name, {}).get(model)
        return None if record is None else record.owners.pop(address, None)

    def _note(
        self, address: str, model: str, order: NameOrder, had: tuple[NameOrder, int] | None
    ) -> None:
        record = self._record(model, order.name)
        record.note(order)
        if order.adapter is None:
            return
        number = self._num_reported = self._num_reported + 1
        if had is not None and had[0].adapter_id == order.adapter_id:
            number = had[1]
        record.owners[address] = order, number

    def _record(self, model: str, name: str) -> NameRecord:
        return self._names.setdefault(name, {}).setdefault(model, NameRecord(NameOrder(name, 0)))

    def _resolve(self, name: str) -> None:
        """Find what a name means, in each model and in all."""
        records = self._names.get(name, {})
        for model, record in records.items():
            record.resolve()
            self._past.pop((model, name), None)
            if not record.owners:
                self._past[model, name] = None
        meant = [(one.rank, model) for model, one in records.items() if one.meaning is not None]
        self.variants.pop(name, None)
        if meant:
            _, model = max(meant)
            adapter = records[model].meaning
            assert adapter is not None
            self.variants[name] = ModelVariant(model, adapter)
        while len(self._past) > MAX_PAST_NAMES:
            self._forget(*self._past.popitem(last=False)[0])

    def _forget(self, model: str, name: str) -> None:
        del self._names[name][model]
        if not self._names[name]:
            del self._names[name]
