"""Runner without a model, on real KV blocks.

Every KV slot keeps (token, position, name of all before it). The next token is computed
from what is in the blocks the plan names, so a wrong, stale or half-written block gives
another token, exactly as it would with attention.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.kv_cache.groups import FULL, KvCacheSpec
from engine.plan import Plan, PlanRow, RunResult
from engine.request import Failure, RequestId
from kv_transfer.types import NO_BLOCK, BlockId, TokenLogprobs

# Cache content of one position. `prefix` stands for everything that attention mixed in.
Slot = tuple[int, int, int]
GARBAGE: Slot = (-1, -1, -1)

Specs = tuple[KvCacheSpec, ...]  # of the KV groups
ONE_FULL: Specs = (FULL,)


def kv_of(token_ids: Sequence[int], specs: Specs = ONE_FULL) -> list[list[Slot]]:
    """Return the expected cache content for these tokens, by group."""
    slots: list[list[Slot]] = [[] for _ in specs]
    for position, token_id in enumerate(token_ids):
        _append_slots(slots, token_id, position, specs)
    return slots


def next_token(
    slots: Sequence[Sequence[Slot]], seed: int, vocab_size: int, specs: Specs = ONE_FULL
) -> int:
    """Return the next token as a function of the cache content that the last token sees."""
    last = len(slots[0]) - 1
    seen = tuple(
        tuple(its[spec.num_unseen(last) :]) for its, spec in zip(slots, specs, strict=True)
    )
    return hash((_of_one(seen), seed)) % vocab_size


def tokens_alone(
    token_ids: Sequence[int], seed: int, count: int, vocab_size: int, specs: Specs = ONE_FULL
) -> list[int]:
    """Return the outputs of a request that runs alone."""
    slots = kv_of(token_ids, specs)
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token(slots, seed, vocab_size, specs))
        _append_slots(slots, answer[-1], len(slots[0]), specs)
    return answer


class KvTensor:
    """KV blocks. New memory contains garbage."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [[GARBAGE] * block_size for _ in range(num_blocks)]

    def read(self, block_ids: Sequence[BlockId], positions: range) -> list[Slot]:
        return [self._block(block_ids, n)[n % self.block_size] for n in positions]

    def write(self, block_ids: Sequence[BlockId], position: int, slot: Slot) -> None:
        self._block(block_ids, position)[position % self.block_size] = slot

    def spoil(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self.blocks[block_id] = [GARBAGE] * self.block_size

    def _block(self, block_ids: Sequence[BlockId], position: int) -> list[Slot]:
        block_id = block_ids[position // self.block_size]
        if block_id == NO_BLOCK:
            raise AssertionError(f"position {position} has no block")
        return self.blocks[block_id]


@dataclass(slots=True)
class _Row:
    row: PlanRow
    token_ids: list[int]
    num_computed_tokens: int
    block_tables: list[list[BlockId]]


class CrashPlace(Enum):
    START = "when the row is made"
    PASS = "in the pass, after the rows before it"


class Crash(Exception):
    """Injected error that only one request triggers."""


@dataclass(slots=True)
class FakeRunner:
    """Runner that keeps batch rows from plan to plan, as the real one does."""

    kv: KvTensor
    vocab_size: int
    specs: Specs = ONE_FULL
    # With speculation: how many drafted tokens a step may confirm, drawn by `chance`.
    num_lookahead_tokens: int = 0
    # The real runner's block tables are this long, and not a block longer. None: any length.
    max_model_len: int | None = None
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    failing: set[RequestId] = field(default_factory=set)  # their next token is an error
    crashing: dict[RequestId, CrashPlace] = field(default_factory=dict)  # their pass fails
    num_computed: dict[RequestId, int] = field(default_factory=dict)  # tokens run, per request
    _num_drafts_left: int = 0  # in this step
    _rows: dict[RequestId, _Row] = field(default_factory=dict)
    _forgotten: set[RequestId] = field(default_factory=set)  # after a pass that failed

    def run(self, plan: Plan) -> RunResult:
        result = RunResult()
        for request_id in plan.dropped:
            if plan.is_retry or request_id in self._forgotten:
                self._rows.pop(request_id, None)
            else:
                del self._rows[request_id]
        self._forgotten.difference_update(() if plan.is_retry else plan.dropped)
        self._forgotten.update(plan.dropped if plan.is_retry else ())
        for row in plan.started:
            self._forgotten.discard(row.request_id)
            if plan.is_retry:
                self._rows.pop(row.request_id, None)
            if row.request_id in self._rows:
                raise AssertionError(f"{row.request_id} started twice")
            self._crash_if_due(row.request_id, CrashPlace.START)
            tables = [list(table) for table in row.block_tables]
            self._rows[row.request_id] = _Row(
                row, list(row.token_ids), row.num_computed_tokens, tables
            )
        for request_id, added in plan.new_block_ids.items():
            for table, block_ids in zip(self._rows[request_id].block_tables, added, strict=True):
                table += block_ids
        for request_id in [row.request_id for row in plan.started] + list(plan.new_block_ids):
            self._check_table(self._rows[request_id])
        self._num_drafts_left = plan.max_draft_tokens
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._crash_if_due(request_id, CrashPlace.PASS)
            self._run_row(self._rows[request_id], num_tokens, result)
        return result

    def _crash_if_due(self, request_id: RequestId, place: CrashPlace) -> None:
        if self.crashing.get(request_id) is place:
            raise Crash(request_id)

    def _run_row(self, row: _Row, num_tokens: int, result: RunResult) -> None:
        request_id = row.row.request_id
        end = row.num_computed_tokens + num_tokens
        if not row.num_computed_tokens < end <= len(row.token_ids):
            raise AssertionError(f"{request_id} has no tokens up to {end}")
        slots = self._compute(row, end)
        self.num_computed[request_id] = self.num_computed.get(request_id, 0) + num_tokens
        self._give_prompt_logprobs(row, end - num_tokens, end, result)
        if end < len(row.token_ids):
            return
        if request_id in self.failing:
            self.failing.discard(request_id)
            self._spoil(row, range(end - num_tokens, end))
            result.failures[request_id] = Failure("the logits are not finite")
            return
        num_drafts = self._num_drafts(row, num_tokens)
        result.token_ids[request_id] = self._sample(row, slots, num_drafts)
        if num_drafts:
            result.num_proposed[request_id] = num_drafts
        if row.row.sampling.logprobs is not None:
            result.logprobs[request_id] = [logprob_of(t) for t in result.token_ids[request_id]]

    def _compute(self, row: _Row, end: int) -> list[list[Slot]]:
        """Compute the tokens up to `end` from the blocks that they see. Returns all slots."""
        start = row.num_computed_tokens
        slots = []
        for table, spec in zip(row.block_tables, self.specs, strict=True):
            num_unseen = spec.num_unseen(start)
            seen = self.kv.read(table, range(num_unseen, start))
            slots.append([GARBAGE] * num_unseen + seen)
        for position in range(start, end):
            _append_slots(slots, row.token_ids[position], position, self.specs)
            for table, its in zip(row.block_tables, slots, strict=True):
                self.kv.write(table, position, its[-1])
        row.num_computed_tokens = end
        return slots

    def _spoil(self, row: _Row, positions: range) -> None:
        for table in row.block_tables:
            for position in positions:
                self.kv.write(table, position, GARBAGE)

    def _num_drafts(self, row: _Row, num_tokens: int) -> int:
        """Return the number of draft tokens for a row, as the real runner computes it."""
        known = len(row.token_ids)
        if num_tokens != 1 or known <= row.row.num_prompt_tokens:
            return 0
        longest = row.row.num_prompt_tokens + row.row.sampling.max_tokens
        if self.max_model_len is not None:
            longest = min(longest, self.max_model_len)
        most = min(self.num_lookahead_tokens, self._num_drafts_left)
        num_slots = len(row.block_tables[0]) * self.kv.block_size
        num_drafts = max(0, min(most, longest - known - 1, num_slots - known))
        self._num_drafts_left -= num_drafts
        return num_drafts

    def _check_table(self, row: _Row) -> None:
        if self.max_model_len is None:
            return
        num_places = -(-self.max_model_len // self.kv.block_size)
        for table in row.block_tables:
            if len(table) != len(row.block_tables[0]) or len(table) > num_places:
                raise AssertionError(
                    f"{row.row.request_id} has {len(table)} blocks; tables hold {num_places}"
                )

    def _sample(self, row: _Row, slots: list[list[Slot]], num_drafts: int) -> list[int]:
        """Sample a token and accepted drafts. Write garbage for rejected drafts."""
        answer = [next_token(slots, row.row.seed, self.vocab_size, self.specs)]
        row.token_ids.append(answer[0])
        num_confirmed = self.chance.randint(0, num_drafts) if num_drafts else 0
        for _ in range(num_confirmed):
            slots = self._compute(row, len(row.token_ids))
            answer.append(next_token(slots, row.row.seed, self.vocab_size, self.specs))
            row.token_ids.append(answer[-1])
        first_rejected = len(row.token_ids) - 1
        num_rejected = num_drafts - num_confirmed
        self._spoil(row, range(first_rejected, first_rejected + num_rejected))
        return answer

    def _give_prompt_logprobs(self, row: _Row, start: int, end: int, result: RunResult) -> None:
        end = min(end, row.row.num_prompt_tokens)
        if row.row.sampling.prompt_logprobs is None or start >= end:
            return
        result.prompt_logprobs[row.row.request_id] = [
            logprob_of(row.token_ids[place]) if place else None for place in range(start, end)
        ]


def logprob_of(token_id: int) -> TokenLogprobs:
    """Return a logprob that differs between tokens."""
    return TokenLogprobs(token_id, logprob=-0.5 - token_id, rank=1)


def _append_slots(slots: list[list[Slot]], token_id: int, position: int, specs: Specs) -> None:
    """Append what each group keeps of a token: a function of all slots before that it sees."""
    before = tuple(
        tuple(its[max(spec.num_unseen(position), position - 1) :])
        for its, spec in zip(slots, specs, strict=True)
    )
    for group, its in enumerate(slots):
        content = _of_one(before) if len(slots) == 1 else (before, group)
        its.append((token_id, position, hash((content, token_id, position))))


def _of_one(by_group: tuple[object, ...]) -> object:
    """Return the only group's element: tests rely on the tokens of models with one group."""
    return by_group[0] if len(by_group) == 1 else by_group
