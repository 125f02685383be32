"""Counts of the experts that a batch really chooses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from torch import Tensor

from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.model.linear import ExpertChoice, Router
from baton.engine.runner.model.ops import Ops

Route = Callable[[Any, Tensor, Router], ExpertChoice]
IMPLEMENTATIONS: tuple[Any, ...] = (NativeOps, Ops)


class RoutingMeter:
    """Different experts of a layer by number of tokens, of the passes within `count`."""

    def __init__(self, otherwise: Callable[[int], float]) -> None:
        self._otherwise = otherwise  # for numbers of tokens that no pass had
        self._counts: dict[int, list[int]] = defaultdict(list)

    def num_experts(self, num_tokens: int) -> float:
        """Return the mean over the layers and passes with this number of tokens."""
        counts = self._counts.get(num_tokens)
        return fmean(counts) if counts else self._otherwise(num_tokens)

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count in all passes of this process. The counting takes time."""
        originals = [(kind, kind.route) for kind in IMPLEMENTATIONS]
        for kind, route in originals:
            kind.route = self._counting(route)
        try:
            yield
        finally:
            for kind, route in originals:
                kind.route = route

    def _counting(self, route: Route) -> Route:
        def counted(ops: Any, hidden_states: Tensor, router: Router) -> ExpertChoice:
            routing = route(ops, hidden_states, router)
            self._counts[len(hidden_states)].append(len(routing.expert_ids.unique()))
            return routing

        return counted
