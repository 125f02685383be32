"""Context of a request in the pipeline: deadline, trace, and state shared between answers."""

from __future__ import annotations

from dataclasses import dataclass

from router.input_processing.logprob_limits import LogprobBudget
from router.shared_prompt import SharedPrompt
from router.tracing import UNTRACED, RequestTrace
from rpc.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class RequestContext:
    received_s: float
    deadline_s: float | None = None  # on the same clock; None: no deadline
    trace: RequestTrace = UNTRACED
    shared: SharedPrompt | None = None  # by all answers to its prompt; None: there is one
    logprob_budget: LogprobBudget | None = None  # of the whole client request; None: separate

    def remaining_s(self, now: float) -> float | None:
        """Return the time until the deadline. Raises DeadlineExceeded if it has passed."""
        if self.deadline_s is None:
            return None
        if now >= self.deadline_s:
            raise DeadlineExceeded("the client's deadline passed before the answer was complete")
        return self.deadline_s - now
