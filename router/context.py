"""Context of a request in the pipeline: deadline, trace, and links to answers to its prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.router.dispatch.quarantine import PromptGroup
from baton.router.input_processing.limits import LogprobBudget
from baton.router.routing.nodes import Node
from baton.router.tracing import UNTRACED, RequestTrace
from baton.router.values import TokenPrompt
from baton.rpc.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class PromptPlacement:
    """Decode node of a prompt that several answers share."""

    prompt: TokenPrompt
    decode: Node
    cache_salt: str  # of the KV
    has_kv: bool = False  # it has the KV of the whole prompt


def _ignore_count(count: int) -> None:
    """Drop the number: nothing is limited."""


def _ignore(placement: PromptPlacement) -> None:
    """Drop the placement: no other answer needs it."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    received_s: float
    deadline_s: float | None = None  # on the same clock; None: no deadline
    trace: RequestTrace = UNTRACED
    owner: str = ""  # digest of the client's token; empty without authentication
    logprob_budget: LogprobBudget | None = None  # of the whole client request; None: separate
    quarantine_group: PromptGroup | None = None  # of all answers to the prompt; None: separate
    # Of the prompt, by another answer. The request keeps to its model revision, and uses the node
    # if that has the KV and room.
    placement: PromptPlacement | None = None
    # Called when nodes are chosen, and again when the decode node has the KV.
    note_placement: Callable[[PromptPlacement], None] = _ignore
    warnings: tuple[str, ...] = ()  # about the whole client request: what is done only in part
    note_tokens: Callable[[int], None] = _ignore_count  # called with numbers of computed tokens

    def remaining_s(self, now: float) -> float | None:
        """Return the time until the deadline. Raises DeadlineExceeded if it has passed."""
        if self.deadline_s is None:
            return None
        if now >= self.deadline_s:
            raise DeadlineExceeded("the client's deadline passed before the answer was complete")
        return self.deadline_s - now
