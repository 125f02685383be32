"""Adapters that nodes report, and the one that a name means where nodes differ. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.ids import AdapterRef, ModelVariant
from baton.rpc.node_info import NO_ADAPTERS, NodeAdapters, UnloadedAdapter

Rank = tuple[int, str]  # generation of an order, and the id that it gives; empty: an unload
NO_RANK: Rank = (0, "")
Named = tuple[int, AdapterRef]  # adapter that a node has under a name, and its generation


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Adapters of one node."""

    model: str
    reported: NodeAdapters = NO_ADAPTERS
    known: frozenset[str] = frozenset()  # ids, also of those without a name
    in_memory: frozenset[str] = frozenset()
    named: Mapping[str, Named] = field(default_factory=dict)  # by name
    unloaded: frozenset[UnloadedAdapter] = frozenset()


NO_REPORT = AdapterReport("")
MAX_PAST_NAMES = 4096  # that no node has at present; those of the last orders are remembered


@dataclass(frozen=True, slots=True)
class NameOrder:
    """Order of an operator: load an adapter under a name, or unload the name."""

    name: str
    generation: int
    adapter: AdapterRef | None = None  # None: unload


class NameRecord:
    """Nodes of one model that have a name, and the last order about it."""

    def __init__(self) -> None:
        self.num_nodes: Counter[tuple[int, AdapterRef]] = Counter()
        self.last = NO_RANK
        self.meaning: AdapterRef | None = None
        self._last_adapter: AdapterRef | None = None
        self._numbers: dict[str, int] = {}  # of first reports, by id

    @property
    def rank(self) -> tuple[int, int, int]:
        newest = max(self._numbers.values(), default=0)
        return self.last[0], self.num_nodes.total(), newest

    def add(self, generation: int, adapter: AdapterRef, number: int) -> None:
        self.num_nodes[generation, adapter] += 1
        self._numbers.setdefault(adapter.id, number)
        self.note_order(generation, adapter)

    def remove(self, generation: int, adapter: AdapterRef) -> None:
        self.num_nodes[generation, adapter] -= 1
        self.num_nodes += Counter()  # drop what no node has
        if not any(adapter.id == each.id for _, each in self.num_nodes):
            del self._numbers[adapter.id]

    def note_order(self, generation: int, adapter: AdapterRef | None) -> None:
        rank = generation, "" if adapter is None else adapter.id
        if rank > self.last:
            self.last, self._last_adapter = rank, adapter

    def resolve(self) -> None:
        """Find what the name means: the last order, while a node has the name."""
        generation, adapter_id = self.last
        self.meaning = None
        if not self.num_nodes or (generation and not adapter_id):
            return
        if not generation:  # adapters of nodes' starts, which have no order
            counts = Counter(adapter.id for _, adapter in self.num_nodes.elements())
            adapter_id = max(counts, key=lambda each: (counts[each], self._numbers[each]))
        refs = [adapter for _, adapter in self.num_nodes if adapter.id == adapter_id]
        # Nodes that lack the adapter can read it only with a path.
        self.meaning = max(refs, key=_path, default=self._last_adapter)

    def order_for(self, name: str, own: Named | None) -> NameOrder | None:
        """Return the order that a node has missed. `own` is what it has, if anything."""
        if own is not None and ((own[0], own[1].id) >= self.last or not self.last[0]):
            return None
        if self.last[0] and not self.last[1]:
            return None if own is None else NameOrder(name, self.last[0])
        can_load = self.meaning is not None and self.meaning.path
        return NameOrder(name, self.last[0], self.meaning) if can_load else None


class AdapterTable:
    """Reports of all nodes by address, and the adapters that names mean.

    Orders of operators are numbered: nodes report the generation of each name, and of each unload.
    Where nodes differ, a name means the adapter of the last order, whatever the others have; after
    an unload it means nothing, although a node may still have it. Adapters that nodes have from
    their start, by `--lora`, are older than any order; of these, a name means the one that most
    nodes have, or else the one that was reported last for the first time.

    Orders outlive the last node that has the name, so a node that returns with an older one does
    not revive it.
    """

    def __init__(self) -> None:
        self.version = 0  # changes with names and orders
        self._reports: dict[str, AdapterReport] = {}
        self._num_reported = self._last_generation = 0
        self._names: dict[str, dict[str, NameRecord]] = {}  # by name and model
        self._variants: dict[str, ModelVariant] = {}
        self._past: OrderedDict[tuple[str, str], None] = OrderedDict()  # lost last at the end

    @property
    def variants(self) -> Mapping[str, ModelVariant]:
        """The adapter that each name means."""
        return self._variants

    def at(self, address: str) -> AdapterReport:
        return self._reports.get(address, NO_REPORT)

    def has_report_of(self, address: str) -> bool:
        return self.at(address).reported is not NO_ADAPTERS

    def generation_at(self, address: str, name: str) -> int:
        """Return the generation of a node's last order about a name; 0 if it reports none."""
        report = self.at(address)
        if name in report.named:
            return report.named[name][0]
        return max((each.generation for each in report.unloaded if each.name == name), default=0)

    def join(self, address: str, model: str) -> None:
        self._replace(address, AdapterReport(model))

    def lose(self, address: str) -> None:
        self._replace(address, NO_REPORT)
        self._reports.pop(address, None)

    def note(self, address: str, reported: NodeAdapters) -> bool:
        """Record what a node has. Return whether it has gained or lost adapters."""
        each = reported.adapters
        report = AdapterReport(
            self._reports[address].model,
            reported,
            frozenset(one.adapter.id for one in each),
            frozenset(one.adapter.id for one in each if one.is_in_memory),
            {one.adapter.name: (one.generation, one.adapter) for one in each if one.adapter.name},
            frozenset(reported.unloaded),
        )
        return self._replace(address, report)

    def next_generation(self, name: str, now_ns: int) -> int:
        """Return a generation for an order, higher than all that nodes have reported of its name.

        It is even; the odd one above it is for undoing the order. Other names do not count: a node
        whose clock is days ahead must not have all orders refused.
        """
        self._last_generation = max(now_ns, self._last_generation + 2) & ~1
        last = max((one.last[0] for one in self._names.get(name, {}).values()), default=0)
        return max(self._last_generation, last + 2) & ~1

    def note_unload(self, model: str, name: str, generation: int) -> None:
        """Record an unload that is sent to all nodes of a model."""
        self._record(model, name).note_order(generation, None)
        self._resolve(model, name)
        self.version += 1

    def missed_by(self, address: str, *, is_joining: bool) -> list[NameOrder]:
        """Return the orders whose names are older on a node, or which it lacks when it joins.

        A node that lacks a name later has been ordered to.
        """
        names = self._names if is_joining else self.at(address).named
        orders = (self.missed_order(address, name) for name in names)
        return [order for order in orders if order is not None]

    def missed_order(self, address: str, name: str) -> NameOrder | None:
        report = self.at(address)
        record = self._names.get(name, {}).get(report.model)
        return None if record is None else record.order_for(name, report.named.get(name))

    def _replace(self, address: str, report: AdapterReport) -> bool:
        before = self.at(address)
        self._reports[address] = report
        gained, lost = _added(report, before), _added(before, report)
        unloaded = report.unloaded - before.unloaded
        if not gained and not lost and not unloaded:
            return False
        self.version += 1
        changed: set[tuple[str, str]] = set()
        for generation, adapter in lost:
            self._record(before.model, adapter.name).remove(generation, adapter)
            changed.add((before.model, adapter.name))
        for generation, adapter in sorted(gained, key=_sort_key):
            self._num_reported += 1
            record = self._record(report.model, adapter.name)
            record.add(generation, adapter, self._num_reported)
            changed.add((report.model, adapter.name))
        for name, generation in unloaded:
            self._record(report.model, name).note_order(generation, None)
            changed.add((report.model, name))
        for model, name in changed:
            self._resolve(model, name)
        return True

    def _record(self, model: str, name: str) -> NameRecord:
        return self._names.setdefault(name, {}).setdefault(model, NameRecord())

    def _resolve(self, model: str, name: str) -> None:
        records = self._names[name]
        records[model].resolve()
        self._past.pop((model, name), None)
        if not records[model].num_nodes:
            self._past[model, name] = None
            if len(self._past) > MAX_PAST_NAMES:
                self._forget(*self._past.popitem(last=False)[0])
        meant = [(one.rank, model) for model, one in records.items() if one.meaning is not None]
        self._variants.pop(name, None)
        if meant:
            _, model = max(meant)
            adapter = records[model].meaning
            assert adapter is not None
            self._variants[name] = ModelVariant(model, adapter)

    def _forget(self, model: str, name: str) -> None:
        del self._names[name][model]
        if not self._names[name]:
            del self._names[name]


def _added(report: AdapterReport, to: AdapterReport) -> list[Named]:
    return [own for name, own in report.named.items() if to.named.get(name) != own]


def _path(adapter: AdapterRef) -> str:
    return adapter.path


def _sort_key(named: Named) -> tuple[str, str, str]:
    _, adapter = named
    return adapter.name, adapter.id, adapter.path
