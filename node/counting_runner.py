"""Metrics of engine steps: duration, batch size and computed prompt tokens."""

from __future__ import annotations

import time

from engine.plan import Plan, Runner, RunResult
from engine.request import RequestId
from telemetry.metrics.instruments import NodeMetrics


class PromptTokens:
    """Counts the prompt tokens that each plan computes. It must receive every plan.

    A request is tracked until its prompt is computed.
    """

    def __init__(self) -> None:
        self._num_missing: dict[RequestId, int] = {}  # of the prompts that are partly computed

    def computed_by(self, plan: Plan) -> int:
        if plan.is_retry:
            return 0  # counted at the failed pass
        for request_id in plan.dropped:
            self._num_missing.pop(request_id, None)
        for row in plan.started:
            num_missing = row.num_prompt_tokens - row.num_computed_tokens
            if num_missing > 0:
                self._num_missing[row.request_id] = num_missing
        return self._advance(plan) if self._num_missing else 0

    def _advance(self, plan: Plan) -> int:
        num_computed = 0
        for request_id, num_missing in list(self._num_missing.items()):
            num = min(num_missing, plan.num_scheduled_tokens.get(request_id, 0))
            num_computed += num
            self._num_missing[request_id] = num_missing - num
            if num == num_missing:
                del self._num_missing[request_id]
        return num_computed


class CountedRunner:
    """Runner decorator that reports each step to the metrics."""

    def __init__(self, runner: Runner, metrics: NodeMetrics) -> None:
        self._runner = runner
        self._metrics = metrics
        self._prompts = PromptTokens()

    def run(self, plan: Plan) -> RunResult:
        num_computed = self._prompts.computed_by(plan)
        began_s = time.monotonic()
        result = self._runner.run(plan)
        if plan.num_scheduled_tokens:
            took_s = time.monotonic() - began_s
            self._metrics.observe_step(took_s, len(plan.num_scheduled_tokens), num_computed)
        return result
