"""A planned step whose result is not known yet, and what becomes of its requests meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.ids import RequestId
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.plan import Plan
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.step_pace import StepLoad


@dataclass(slots=True, eq=False)
class PlannedStep:
    plan: Plan
    chunks: list[tuple[Request, int]]  # prefill tokens of the plan
    load: StepLoad
    # Requests of the plan that have ended since. Their results are ignored.
    ended: set[RequestId] = field(default_factory=set)
    # KV of those: released with the result, since the pass may still write it.
    written: list[HeldKv] = field(default_factory=list)

    @property
    def num_decodes(self) -> int:
        return len(self.plan.num_scheduled_tokens) - len(self.chunks)

    def num_tokens_of(self, request: Request) -> int:
        """Return the scheduled tokens of a request that has not ended."""
        request_id = request.request_id
        # A request of the same id may have begun after one that has ended.
        return 0 if request_id in self.ended else self.plan.num_scheduled_tokens.get(request_id, 0)

    def end(self, request: Request) -> bool:
        """Note that a request has ended. Returns False if the plan does not contain it."""
        if not self.num_tokens_of(request):
            return False
        self.ended.add(request.request_id)
        return True
