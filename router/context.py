"""What a request carries through the whole pipeline beside what it asks."""

from __future__ import annotations

from dataclasses import dataclass

from router.shared_prompt import SharedPrompt
from router.sizes import LogprobBudget
from router.tracing import UNTRACED, Trace
from serving.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class RequestContext:
    received_s: float
    deadline_s: float | None = None  # on the same clock; None: the client waits for ever
    trace: Trace = UNTRACED
    shared: SharedPrompt | None = None  # with the other answers to its prompt
    logprob_budget: LogprobBudget | None = None  # of the whole request; None: one of its own

    def remaining_s(self, now: float) -> float | None:
        """The time that is left for nodes. Raises DeadlineExceeded when there is none."""
        if self.deadline_s is None:
            return None
        if now >= self.deadline_s:
            raise DeadlineExceeded("the client's deadline passed before the answer was whole")
        return self.deadline_s - now
