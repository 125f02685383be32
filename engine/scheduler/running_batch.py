"""The running batch, with its changes since the last plan.

Decoding requests cost no work per step here: they stay in a table of scheduled tokens, and a
calendar lists the step in which each needs its next block.
"""

from __future__ import annotations

from baton.core.ids import RequestId
from baton.engine.plan import NO_STATE_COPIES, BlockTables, Plan, PlanRow, StateCopies
from baton.engine.scheduler.request import BY_RANK, NOT_DUE, Request
from baton.engine.step_calendar import StepCalendar
from baton.kv_transfer.types import KvOrders


class Batch:
    def __init__(self, num_slots_per_decode: int) -> None:
        self._num_slots_per_decode = num_slots_per_decode
        self.running: dict[RequestId, Request] = {}
        self.prefilling: dict[RequestId, Request] = {}  # the subset of `running` in prefill
        self.chunks: list[tuple[Request, int]] = []  # prefill tokens in the current plan
        self._decode_tokens: dict[RequestId, int] = {}
        self._calendar: StepCalendar[Request] = StepCalendar()
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
        self.chunks = []
        short = []
        for request in self._calendar.begin_step():
            # Entries of removed requests stay behind, and a resumed request can have two.
            if request.due_step == self._calendar.step:
                request.due_step = NOT_DUE
                short.append(request)
        short.sort(key=BY_RANK)
        return short

    def num_due_next(self) -> int:
        """Return the number of decoding requests that need blocks for the next step, at most."""
        return len(self._calendar.next_entries())

    def start_prefill(self, request: Request, num_tokens: int) -> None:
        self._start(request)
        self.prefilling[request.request_id] = request
        self.chunks.append((request, num_tokens))

    def continue_prefill(self, request: Request, num_tokens: int) -> None:
        self.chunks.append((request, num_tokens))

    def start_decode(self, request: Request, capacity: int) -> None:
        """Add a request whose last token alone is not computed. It decodes from this step on."""
        self._start(request)
        self._decode_tokens[request.request_id] = 1
        self._set_due(request, capacity, self._calendar.step)

    def turn_to_decode(self, request: Request, capacity: int) -> None:
        """Move a request from prefill to decode. It decodes from the next step on."""
        del self.prefilling[request.request_id]
        self._decode_tokens[request.request_id] = 1
        self._set_due(request, capacity, self._calendar.step + 1)

    def grow(
        self, request: Request, block_ids: BlockTables, capacity: int, num_pending: int = 0
    ) -> None:
        """Add blocks of a decoding request, of which a pass computes `num_pending` tokens now."""
        # With speculation, a request can be due while its last block has room.
        if block_ids[0]:
            self._new_block_ids[request.request_id] = block_ids
        self._set_due(request, capacity, self._calendar.step - num_pending)

    def decodes_after(self, num_pending: int) -> dict[RequestId, int]:
        """Return the decodes of a plan, without those that so many more tokens end."""
        return {
            request_id: 1
            for request_id, request in self.running.items()
            if len(request.token_ids) + num_pending < request.max_num_tokens
        }

    def remove(self, request: Request) -> None:
        request_id = request.request_id
        del self.running[request_id]
        self.prefilling.pop(request_id, None)
        self._decode_tokens.pop(request_id, None)
        self._new_block_ids.pop(request_id, None)
        # Its entries in the calendar stay: `begin_step` skips them.
        request.due_step = NOT_DUE
        self._dropped.append(request_id)

    def take_plan(
        self,
        kv_orders: KvOrders,
        max_draft_tokens: int = 0,
        state_copies: StateCopies = NO_STATE_COPIES,
        decodes: dict[RequestId, int] | None = None,  # None: of all requests that decode
    ) -> Plan:
        num_scheduled_tokens = self._decode_tokens.copy() if decodes is None else decodes
        num_prompt_tokens = 0
        for request, num_tokens in self.chunks:
            num_scheduled_tokens[request.request_id] = num_tokens
            # The others are output tokens of a resumed request.
            num_missing = max(0, request.num_prompt_tokens - request.kv.num_computed_tokens)
            num_prompt_tokens += min(num_missing, num_tokens)
        plan = Plan(
            dropped=tuple(self._dropped),
            started=tuple(self._started),
            new_block_ids=self._new_block_ids,
            num_scheduled_tokens=num_scheduled_tokens,
            num_prompt_tokens=num_prompt_tokens,
            has_chunks=bool(self.chunks),
            max_draft_tokens=max_draft_tokens,
            kv_orders=kv_orders,
            state_copies=state_copies,
        )
        self._dropped.clear()
        self._started.clear()
        self._new_block_ids = {}
        return plan

    def _start(self, request: Request) -> None:
        self.running[request.request_id] = request
        self._started.append(make_row(request))

    def _set_due(self, request: Request, capacity: int, step: int) -> None:
        """Record the first step from `step` on in which the request's tokens might not fit.

        `step` is the one that computes the token after `num_computed_tokens`.

        A request advances by at most `num_slots_per_decode` per step. Without speculation the
        step is exact; with it, the request may be checked early. A request that has all the
        slots it can need is never due.
        """
        if capacity >= request.max_num_slots:
            request.due_step = NOT_DUE
            return
        room = capacity - request.kv.num_computed_tokens - self._num_slots_per_decode
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
    )
