"""The running batch, with its changes since the last plan.

Decoding requests cost no work per step here: they stay in a table of scheduled tokens, and a
calendar lists the step in which each needs its next block.

The batch is that of the next plan, while `num_computed_tokens` and the tokens of a request are
those before the plan that awaits its result, if there is one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.core.ids import RequestId
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.plan import (
    NO_MEDIA,
    NO_STATE_COPIES,
    BlockTables,
    MediaOrders,
    Plan,
    PlanRow,
    StateCopies,
)
from baton.engine.scheduler.prompt_budget import StepLoad
from baton.engine.scheduler.request import BY_RANK, NOT_DUE, Request
from baton.engine.step_calendar import StepCalendar
from baton.kv_transfer.types import KvOrders


class RunningBatch:
    def __init__(self, num_slots_per_decode: int) -> None:
        self._num_slots_per_decode = num_slots_per_decode
        self.running: dict[RequestId, Request] = {}
        self.prefilling: dict[RequestId, Request] = {}  # the subset of `running` in prefill
        self.chunks: dict[Request, int] = {}  # prefill tokens in the current plan
        self._decode_tokens: dict[RequestId, int] = {}
        self._calendar: StepCalendar[Request] = StepCalendar()
        self.pending: deque[PlannedStep] = deque()  # they await their results: at most two
        self._dropped: list[RequestId] = []
        self._started: list[PlanRow] = []
        self._new_block_ids: dict[RequestId, BlockTables] = {}

    def __len__(self) -> int:
        return len(self.running)

    @property
    def num_decoding(self) -> int:
        return len(self._decode_tokens)

    @property
    def has_changes(self) -> bool:
        return bool(self._dropped)

    def begin_step(self) -> list[Request]:
        """Begin a step. Returns the decoding requests that need blocks for it, in rank order."""
        self.chunks = {}
        short = self.due_next()
        self._calendar.begin_step()
        for request in short:
            request.due_step = NOT_DUE
        return short

    def due_next(self) -> list[Request]:
        """Return the decoding requests that need blocks for the next step, in rank order."""
        step = self._calendar.step + 1
        # Entries of removed requests stay behind, and a resumed request can have two.
        found = dict.fromkeys(
            each for each in self._calendar.next_entries() if each.due_step == step
        )
        return sorted(found, key=BY_RANK)

    # --- positions after the pending steps ----------------------------------------

    def position(self, request: Request) -> int:
        """Return the number of tokens that are computed once the pending steps have ended.

        With speculation, this is the least of a decoding request.
        """
        position = request.kv.num_computed_tokens
        for step in self.pending:
            position += step.num_tokens_of(request)
        return position

    def max_position(self, request: Request) -> int:
        """Return the most tokens that are computed then: all drafts may be accepted."""
        num_steps = sum(1 for step in self.pending if step.num_tokens_of(request))
        return self.position(request) + num_steps * (self._num_slots_per_decode - 1)

    # --- requests of the batch ----------------------------------------------------

    def start_prefill(self, request: Request, num_tokens: int) -> None:
        self._start(request)
        self.prefilling[request.request_id] = request
        self.continue_prefill(request, num_tokens)

    def continue_prefill(self, request: Request, num_tokens: int) -> None:
        """Add tokens of a prompt, also to those that it has in this plan already."""
        if num_tokens:
            self.chunks[request] = self.chunks.get(request, 0) + num_tokens

    def start_decode(self, request: Request, capacity: int) -> None:
        """Add a request whose last token alone is not computed. It decodes from this step on."""
        self._start(request)
        self._decode_tokens[request.request_id] = 1
        self._set_due(request, capacity, self._calendar.step)

    def turn_to_decode(self, request: Request, capacity: int) -> None:
        """Move a request whose prefill the last plan completes. It decodes from the next one on."""
        del self.prefilling[request.request_id]
        self._decode_tokens[request.request_id] = 1
        self._set_due(request, capacity, self._calendar.step + 1)

    def grow(self, request: Request, block_ids: BlockTables, capacity: int) -> None:
        """Add blocks of a decoding request."""
        # With speculation, a request can be due while its last block has room.
        if block_ids[0]:
            self._new_block_ids[request.request_id] = block_ids
        self._set_due(request, capacity, self._calendar.step)

    def remove(self, request: Request) -> bool:
        """Remove a request. Returns whether a pending pass may still write its blocks.

        They are then kept, to be released with the result of that pass.
        """
        request_id = request.request_id
        del self.running[request_id]
        self.prefilling.pop(request_id, None)
        self._decode_tokens.pop(request_id, None)
        self._new_block_ids.pop(request_id, None)
        # Its entries in the calendar stay: `due_next` skips them.
        request.due_step = NOT_DUE
        self._dropped.append(request_id)
        writing = [step for step in self.pending if step.end(request)]
        if writing:
            writing[-1].written.append(request.kv)
        return bool(writing)

    # --- the plan -----------------------------------------------------------------

    def decodes(self) -> dict[RequestId, int]:
        """Return the decodes of this step, without requests that the pending one ends for sure."""
        if not self.pending:
            return self._decode_tokens.copy()
        pending, running = self.pending[0], self.running
        scheduled = pending.plan.num_scheduled_tokens.keys() - pending.ended
        return {
            request_id: 1
            for request_id in self._decode_tokens
            if len(running[request_id].token_ids) + (request_id in scheduled)
            < running[request_id].max_num_tokens
        }

    def take_plan(
        self,
        decodes: dict[RequestId, int],
        load: StepLoad,
        kv_orders: KvOrders,
        max_draft_tokens: int = 0,
        state_copies: StateCopies = NO_STATE_COPIES,
        media: MediaOrders = NO_MEDIA,
    ) -> Plan:
        """Return the plan of this step, which is pending from now on."""
        num_scheduled_tokens, num_prompt_tokens = decodes, 0
        for request, num_tokens in self.chunks.items():
            num_scheduled_tokens[request.request_id] = num_tokens
            # The others are output tokens of a resumed request.
            num_missing = max(0, request.num_prompt_tokens - self.position(request))
            num_prompt_tokens += min(num_missing, num_tokens)
        plan = Plan(
            dropped=tuple(self._dropped),
            started=tuple(self._started),
            new_block_ids=self._new_block_ids,
            num_scheduled_tokens=num_scheduled_tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_draft_tokens=max_draft_tokens,
            kv_orders=kv_orders,
            state_copies=state_copies,
            media=media,
        )
        self._dropped.clear()
        self._started.clear()
        self._new_block_ids = {}
        self.pending.append(PlannedStep(plan, list(self.chunks.items()), load))
        return plan

    def _start(self, request: Request) -> None:
        self.running[request.request_id] = request
        self._started.append(make_row(request))

    def _set_due(self, request: Request, capacity: int, step: int) -> None:
        """Record the first step from `step` on in which the request's tokens might not fit.

        `step` is the one that computes the token after `max_position`.

        A request advances by at most `num_slots_per_decode` per step. Without speculation the
        step is exact; with it, the request may be checked early. A request that has all the
        slots it can need is never due.
        """
        if capacity >= request.max_num_slots:
            request.due_step = NOT_DUE
            return
        room = capacity - self.max_position(request) - self._num_slots_per_decode
        due_step = step + room // self._num_slots_per_decode + 1
        if due_step <= self._calendar.step:  # too few blocks for draft tokens
            due_step = self._calendar.step + 1
        request.due_step = due_step
        self._calendar.add(due_step, request)


def make_row(request: Request) -> PlanRow:
    """Return the full state of a request for the runner, as of before the pass."""
    return PlanRow(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.kv.num_computed_tokens,
        block_tables=tuple(map(tuple, request.kv.block_tables)),
        sampling=request.submitted.sampling,
        seed=request.submitted.seed,
        grammar=request.grammar,
        state=request.kv.state_blocks,
        task=request.submitted.task,
        adapter=request.submitted.adapter.id,
        media=request.submitted.media,
        prefix_keys=request.submitted.prefix_keys,
        predicted_token_ids=request.submitted.predicted_token_ids,
        draft_state=request.draft_state if request.has_one_new_token else b"",
    )


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A planned step whose result is not known yet, and what becomes of its requests meanwhile."""

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
