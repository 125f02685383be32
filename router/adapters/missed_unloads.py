"""Unloads of adapters that nodes have missed while the router could not reach them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from baton.core.ids import Incarnation
from baton.router.routing.node_table import Node

MAX_PROCESSES = 256  # remembered; the ones that have been away longest are forgotten


@dataclass(slots=True)
class _AwayNode:
    model: str
    names: Collection[str] = ()  # of adapters that it had
    missed: set[str] = field(default_factory=set)


class MissedUnloads:
    """Names that processes of nodes must forget when they return, since an operator said so.

    A process that was started after an unload has missed nothing: its `--lora` is a later word.
    """

    def __init__(self) -> None:
        self._away: OrderedDict[Incarnation, _AwayNode] = OrderedDict()

    def of(self, node: Node) -> set[str]:
        away = self._away.get(node.card.incarnation)
        return set() if away is None else set(away.missed)

    def note_gone(self, node: Node, names: Collection[str]) -> None:
        """Record that a node which had adapters of these names is not reachable any more."""
        self._away_node(node).names = names

    def note_return(self, node: Node) -> None:
        """Record that a node has forgotten what it had missed."""
        self._away.pop(node.card.incarnation, None)

    def note_unload(self, name: str, model: str = "") -> None:
        """Record an unload from all nodes, of one model or of any."""
        for away in self._away.values():
            if name in away.names and model in ("", away.model):
                away.missed.add(name)

    def note_failure(self, node: Node, name: str) -> None:
        """Record a node that could not be told to unload an adapter."""
        self._away_node(node).missed.add(name)

    def note_load(self, name: str) -> None:
        """Record that a name is in use again."""
        for away in self._away.values():
            away.missed.discard(name)

    def _away_node(self, node: Node) -> _AwayNode:
        away = self._away.setdefault(node.card.incarnation, _AwayNode(node.card.model))
        self._away.move_to_end(node.card.incarnation)
        while len(self._away) > MAX_PROCESSES:
            self._away.popitem(last=False)
        return away
