"""Gauges of a node that are read at each scrape."""

from __future__ import annotations

from baton.engine.runner.device.graphs import EagerCause, GraphSize
from baton.node.observers.metrics import passes_by_launch


def test_passes_are_counted_by_graph_or_by_the_reason_why_none_was_replayed() -> None:
    passes: dict[GraphSize | EagerCause, int] = {GraphSize(1, 8): 2, GraphSize(4, 8): 3}
    passes[EagerCause.TOO_MANY_ROWS] = 4
    passes[GraphSize(4, 8, has_adapters=True)] = 6

    found = {"graph": 5, "graph_with_adapters": 6, "too_many_rows": 4}
    assert passes_by_launch(passes) == found
    assert passes_by_launch({}) == {"graph": 0}
