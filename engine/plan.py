"""A step as values: what the scheduler asks for, and what the runner and the wire answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine.grammar import Grammar
from engine.request import RequestId
from engine.sampling import SamplingParams
from kv_transfer.types import BlockId, KvOrders, KvReports, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Row:
    """A request that enters the runner's batch, new or resumed: all that is known of it."""

    request_id: RequestId
    token_ids: tuple[int, ...]  # prompt and outputs so far
    num_prompt_tokens: int  # the rest are outputs, for penalties
    num_computed_tokens: int  # their KV is in block_ids already
    block_ids: tuple[BlockId, ...]
    sampling: SamplingParams
    seed: int
    grammar: Grammar | None = None  # which tokens it may write


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of the batch as changes against the last one.

    The runner keeps each row's tokens, blocks and `num_computed_tokens` by itself: it
    advances by `num_scheduled_tokens`, and takes a sampled token into the row. A row whose
    scheduled tokens reach its last known token is sampled; one in the middle of a chunked
    prefill is not.
    """

    dropped: tuple[RequestId, ...] = ()  # rows to forget: finished, aborted or preempted
    started: tuple[Row, ...] = ()
    new_block_ids: dict[RequestId, tuple[BlockId, ...]] = field(default_factory=dict)
    num_scheduled_tokens: dict[RequestId, int] = field(default_factory=dict)
    # With speculation: what is left of the step's budget for drafted tokens of all rows.
    max_draft_tokens: int = 0
    kv_orders: KvOrders = KvOrders()
    # Part of a pass that failed, run again. The runner forgets all rows that the plan names,
    # known or not, before it starts any; no layer of it may leave before the pass has ended.
    is_retry: bool = False

    @property
    def concerns_runner(self) -> bool:
        return bool(self.num_scheduled_tokens or self.started or self.dropped)

    @property
    def is_empty(self) -> bool:
        """Nothing can be done now; nor can it in the next step, unless something happens."""
        return not self.concerns_runner and self.kv_orders == KvOrders()


@dataclass(frozen=True, slots=True)
class RunResult:
    """What the forward pass gave, by request."""

    token_ids: dict[RequestId, list[int]] = field(default_factory=dict)
    logprobs: dict[RequestId, list[TokenLogprobs]] = field(default_factory=dict)
    # Logprobs of prompt tokens scheduled in this step, the first of a prompt being None.
    prompt_logprobs: dict[RequestId, list[TokenLogprobs | None]] = field(default_factory=dict)
    errors: dict[RequestId, str] = field(default_factory=dict)  # instead of a token
    refusals: dict[RequestId, str] = field(default_factory=dict)  # the same, by its own fault
    crashes: dict[RequestId, str] = field(default_factory=dict)  # each failed its whole pass
    # With speculation: how many tokens were proposed; `token_ids` has those that came true.
    num_proposed: dict[RequestId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    run: RunResult
    kv: KvReports = KvReports()


class Runner(Protocol):
    """Runs the model over a plan. The one room behind this border that knows torch."""

    def run(self, plan: Plan) -> RunResult: ...
