"""Adapters that nodes report, and the one that a name means where nodes differ. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.ids import AdapterRef, ModelVariant
from baton.rpc.node_info import NO_ADAPTERS, NodeAdapters


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Adapters of one node."""

    model: str
    reported: NodeAdapters = NO_ADAPTERS
    refs: frozenset[AdapterRef] = frozenset()  # those with a name
    known: frozenset[str] = frozenset()  # ids, also of those without a name
    in_memory: frozenset[str] = frozenset()


NO_REPORT = AdapterReport("")
MAX_PAST_MEANINGS = 8  # of a name, that no node has at present
MAX_PAST_NAMES = 1024  # that no node has at present


@dataclass(slots=True)
class Meaning:
    """An adapter that nodes have under a name."""

    model: str
    number: int  # of its first report
    num_nodes: Counter[AdapterRef] = field(default_factory=Counter)  # with equal or unlike paths

    @property
    def rank(self) -> tuple[int, int]:
        return self.num_nodes.total(), self.number

    @property
    def variant(self) -> ModelVariant:
        # Nodes that lack the adapter can read it only with a path.
        return ModelVariant(self.model, max(self.num_nodes, key=_path))


class AdapterTable:
    """Reports of all nodes by address, and the adapters that names mean.

    Where nodes differ, a name means the adapter that most of them have, or else the one that was
    reported last for the first time: a reload reaches one node after the other, and a node that
    was not reachable meanwhile still has the old one. The order outlives the last node that has an
    adapter or a name, since a node that returns with it is no reload.
    """

    def __init__(self) -> None:
        self._reports: dict[str, AdapterReport] = {}
        self._num_meanings = 0
        self._meanings: dict[str, dict[tuple[str, str], Meaning]] = {}  # by name, model and id
        self._variants: dict[str, ModelVariant] = {}
        self._past_names: OrderedDict[str, None] = OrderedDict()  # that were lost last at the end

    @property
    def variants(self) -> Mapping[str, ModelVariant]:
        """The adapter that each name means."""
        return self._variants

    def at(self, address: str) -> AdapterReport:
        return self._reports.get(address, NO_REPORT)

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
            frozenset(one.adapter for one in each if one.adapter.name),
            frozenset(one.adapter.id for one in each),
            frozenset(one.adapter.id for one in each if one.is_in_memory),
        )
        return self._replace(address, report)

    def _replace(self, address: str, report: AdapterReport) -> bool:
        before = self.at(address)
        self._reports[address] = report
        gained, lost = report.refs - before.refs, before.refs - report.refs
        is_joining = before.reported is NO_ADAPTERS
        for ref in sorted(gained, key=_sort_key):
            self._meaning(report.model, ref, is_joining=is_joining).num_nodes[ref] += 1
        for ref in lost:
            self._remove(before.model, ref)
        for name in {ref.name for ref in gained | lost}:
            self._resolve(name)
        return bool(gained or lost)

    def _meaning(self, model: str, ref: AdapterRef, *, is_joining: bool) -> Meaning:
        meanings, key = self._meanings.setdefault(ref.name, {}), (model, ref.id)
        found = meanings.get(key)
        if found is None or not (found.num_nodes or is_joining):
            self._num_meanings += 1
            found = meanings[key] = Meaning(model, self._num_meanings)
        return found

    def _remove(self, model: str, ref: AdapterRef) -> None:
        counts = self._meanings[ref.name][model, ref.id].num_nodes
        counts[ref] -= 1
        if not counts[ref]:
            del counts[ref]

    def _resolve(self, name: str) -> None:
        meanings = self._meanings[name]
        present = [one for one in meanings.values() if one.num_nodes]
        past = sorted((one.number, key) for key, one in meanings.items() if not one.num_nodes)
        for _, key in past[:-MAX_PAST_MEANINGS]:
            del meanings[key]
        self._past_names.pop(name, None)
        if present:
            self._variants[name] = max(present, key=lambda one: one.rank).variant
            return
        self._variants.pop(name, None)
        self._past_names[name] = None
        if len(self._past_names) > MAX_PAST_NAMES:
            del self._meanings[self._past_names.popitem(last=False)[0]]


def _path(adapter: AdapterRef) -> str:
    return adapter.path


def _sort_key(adapter: AdapterRef) -> tuple[str, str, str]:
    return adapter.name, adapter.id, adapter.path
