"""Adapters that nodes report, and the one that a name means where nodes differ. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.ids import AdapterRef, ModelVariant
from baton.rpc.node_info import NO_ADAPTERS, NameOrder, NodeAdapters


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Adapters of one node."""

    model: str
    reported: NodeAdapters = NO_ADAPTERS
    orders: Mapping[str, NameOrder] = field(default_factory=dict)  # the node's last, by name
    # When the node first reported the adapter of a name, as a number.
    since: Mapping[str, int] = field(default_factory=dict)
    known: frozenset[str] = frozenset()  # ids, also of those without a name
    in_memory: frozenset[str] = frozenset()

    def adapter(self, name: str) -> AdapterRef | None:
        """Return what the node has under a name."""
        order = self.orders.get(name)
        return None if order is None else order.adapter


NO_REPORT = AdapterReport("")
MAX_PAST_NAMES = 4096  # that no node has at present; those of the last orders are remembered


@dataclass(frozen=True, slots=True)
class NameRecord:
    """Last order about a name on the nodes of a model, and what the name means there."""

    last: NameOrder
    meaning: AdapterRef | None = None
    rank: tuple[int, int, int] = (0, 0, 0)  # among models: the highest has the name

    @property
    def is_unloaded(self) -> bool:
        return self.last.generation > 0 and self.last.adapter is None

    def order_for(self, own: NameOrder | None) -> NameOrder | None:
        """Return the order that a node has missed. `own` is the load that it has carried out."""
        name, generation = self.last.name, self.last.generation
        if own is not None and (own.rank >= self.last.rank or not generation):
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
        before, orders = self._reports[address], reported.orders()
        since = {}
        for name, order in orders.items():
            is_known = name in before.since and before.orders[name].adapter_id == order.adapter_id
            self._num_reported += not is_known
            since[name] = before.since[name] if is_known else self._num_reported
        ids = {each.adapter.id: each.is_in_memory for each in reported.adapters}
        in_memory = frozenset(each for each, is_in_memory in ids.items() if is_in_memory)
        report = AdapterReport(before.model, reported, orders, since, frozenset(ids), in_memory)
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
        self._note_order(model, NameOrder(name, generation))
        self._resolve(name)
        self.version += 1

    def missed_by(self, address: str, *, is_joining: bool) -> list[NameOrder]:
        """Return the orders whose names are older on a node, or which it lacks when it joins.

        A node that lacks a name later has been ordered to.
        """
        report = self.at(address)
        names = self._names if is_joining else filter(report.adapter, report.orders)
        orders = [self.missed_order(address, name) for name in names]
        return [order for order in orders if order is not None]

    def missed_order(self, address: str, name: str) -> NameOrder | None:
        report = self.at(address)
        record = self._names.get(name, {}).get(report.model)
        own = report.orders[name] if report.adapter(name) is not None else None
        return None if record is None else record.order_for(own)

    def _replace(self, address: str, report: AdapterReport) -> bool:
        before = self.at(address)
        self._reports[address] = report
        names = before.orders.keys() | report.orders.keys()
        changed = [name for name in names if before.orders.get(name) != report.orders.get(name)]
        for name in changed:
            if name in report.orders:
                self._note_order(report.model, report.orders[name])
        for name in changed:
            self._resolve(name)
        self.version += bool(changed)
        return bool(changed)

    def _note_order(self, model: str, order: NameOrder) -> None:
        records = self._names.setdefault(order.name, {})
        record = records.get(model)
        if record is None or order.rank > record.last.rank:
            records[model] = NameRecord(order)

    def _resolve(self, name: str) -> None:
        """Find what a name means, in each model and in all."""
        owners: defaultdict[str, list[tuple[NameOrder, int]]] = defaultdict(list)
        for report in self._reports.values():
            if report.adapter(name) is not None:
                owners[report.model].append((report.orders[name], report.since[name]))
        records = self._names.get(name, {})
        for model, record in records.items():
            records[model] = _resolved(record.last, owners[model])
            self._past.pop((model, name), None)
            if not owners[model]:
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


def _resolved(last: NameOrder, owners: Sequence[tuple[NameOrder, int]]) -> NameRecord:
    """Return what a name means: the last order, while a node has the name.

    `owners` are the loads of nodes that have it, with the number of each node's first report.
    """
    record = NameRecord(last)
    if not owners or record.is_unloaded:
        return record
    counts = Counter(order.adapter_id for order, _ in owners)
    first = {
        each: min(number for order, number in owners if order.adapter_id == each) for each in counts
    }
    adapter_id = last.adapter_id
    if not last.generation:  # adapters of nodes' starts, which have no order
        adapter_id = max(counts, key=lambda each: (counts[each], first[each]))
    refs = [order.adapter for order, _ in owners if order.adapter_id == adapter_id]
    # Nodes that lack the adapter can read it only with a path.
    meaning = max(filter(None, refs), key=lambda each: each.path, default=last.adapter)
    return NameRecord(last, meaning, (last.generation, len(owners), max(first.values())))
