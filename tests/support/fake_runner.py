"""Runner without a model, on real KV blocks.

Every KV slot keeps (token, position, name of all before it). The next token is computed
from what is in the blocks the plan names, so a wrong, stale or half-written block gives
another token, exactly as it would with attention.

With recurrent layers, a state block keeps one part of a state that each token changes and that
goes into every KV slot, so that a wrong or incomplete state gives other tokens, too.

The encoding of a picture is a number for each of its rows, which placeholder tokens take instead of
their own, if the plans had the picture encoded before and not forgotten since.

An adapter goes into every KV slot that it computes. The vector of a pooled row is computed from the
blocks, or, if the pooling needs all tokens, from what the passes with the row have computed.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import ClassVar

from baton.core.ids import NO_BLOCK, BlockId, RequestId
from baton.core.media import MediaSegment, StoredPicture
from baton.core.output import Failure, TokenLogprobs
from baton.engine.kv_cache.groups import FULL, KvCacheSpec
from baton.engine.plan import (
    BlockIds,
    MediaOrders,
    Pending,
    Plan,
    PlanRow,
    Runner,
    RunResult,
    StateBlocks,
    StateSnapshot,
    StoredEncoding,
)

# Cache content of one position. `prefix` stands for everything that attention mixed in.
Slot = tuple[int, int, int]
GARBAGE: Slot = (-1, -1, -1)

Specs = tuple[KvCacheSpec, ...]  # of the KV groups
ONE_FULL: Specs = (FULL,)


@dataclass(slots=True)
class Content:
    """Cache content of a sequence: the slots by KV group, and the parts of the state."""

    slots: list[list[Slot]]
    state: list[Slot]
    adapter: str = ""

    def append(self, token_id: int, specs: Specs) -> None:
        """Append what each group keeps of a token: a function of what it sees before itself."""
        specs = specs or ONE_FULL
        position = len(self.slots[0])
        # As a number: the hash of a text differs from process to process.
        adapter = int.from_bytes(self.adapter.encode())
        computed = (token_id, adapter) if adapter else token_id
        if len(self.slots) == 1 and not self.state:
            (its,), (spec,) = self.slots, specs
            seen: object = _last_seen(its, spec, position)
            its.append((token_id, position, hash((seen, computed, position))))
            return
        before = tuple(
            [_last_seen(its, spec, position) for its, spec in zip(self.slots, specs, strict=True)]
        )
        seen = (before, tuple(self.state)) if self.state else before
        for part, (_, _, old) in enumerate(self.state):
            self.state[part] = (part, position + 1, hash((old, part, seen, computed)))
        for group, its in enumerate(self.slots):
            content = seen if len(self.slots) == 1 else (seen, group)
            its.append((token_id, position, hash((content, computed, position))))

    def copy(self) -> Content:
        return Content([its.copy() for its in self.slots], self.state.copy(), self.adapter)


def _last_seen(slots: Sequence[Slot], spec: KvCacheSpec, position: int) -> tuple[Slot, ...]:
    """Return the slot before `position` if the token at `position` sees it."""
    return (slots[-1],) if spec.num_unseen(position) < position else ()


def empty_content(specs: Specs, num_state_blocks: int, adapter: str = "") -> Content:
    state = [(part, 0, 0) for part in range(num_state_blocks)]
    return Content([[] for _ in specs or ONE_FULL], state, adapter)


def content_of(
    token_ids: Sequence[int],
    specs: Specs = ONE_FULL,
    num_state_blocks: int = 0,
    adapter: str = "",
) -> Content:
    """Return the expected cache content for these tokens."""
    return _known_content(tuple(token_ids), specs, num_state_blocks, adapter).copy()


@lru_cache(maxsize=256)  # a wire compares what it sends at each step
def _known_content(
    token_ids: tuple[int, ...], specs: Specs, num_state_blocks: int, adapter: str
) -> Content:
    content = empty_content(specs, num_state_blocks, adapter)
    for token_id in token_ids:
        content.append(token_id, specs)
    return content


def next_token(content: Content, seed: int, vocab_size: int, specs: Specs = ONE_FULL) -> int:
    """Return the next token as a function of the cache content that the last token sees."""
    last = len(content.slots[0]) - 1
    seen = tuple(
        tuple(its[spec.num_unseen(last) :]) for its, spec in zip(content.slots, specs, strict=True)
    )
    everything = (seen, tuple(content.state)) if content.state else _of_one(seen)
    return hash((everything, seed)) % vocab_size


def tokens_alone(
    token_ids: Sequence[int],
    seed: int,
    count: int,
    vocab_size: int,
    specs: Specs = ONE_FULL,
    num_state_blocks: int = 0,
    adapter: str = "",
) -> list[int]:
    """Return the outputs of a request that runs alone."""
    known = _known_answer(
        tuple(token_ids), seed, count, vocab_size, specs, num_state_blocks, adapter
    )
    return list(known)


@lru_cache(maxsize=256)  # a world compares when a request is added and when it has ended
def _known_answer(
    token_ids: tuple[int, ...],
    seed: int,
    count: int,
    vocab_size: int,
    specs: Specs,
    num_state_blocks: int,
    adapter: str,
) -> tuple[int, ...]:
    content = content_of(token_ids, specs, num_state_blocks, adapter)
    answer: list[int] = []
    for _ in range(count):
        answer.append(next_token(content, seed, vocab_size, specs))
        content.append(answer[-1], specs)
    return tuple(answer)


def vector_of(content: Content, specs: Specs, of_all_tokens: bool) -> bytes:
    """Return the vector of a text as a function of its content, or of what the last token sees."""
    specs = specs or ONE_FULL  # of an encoder, which sees the text itself
    last = len(content.slots[0]) - 1
    seen = tuple(
        tuple(its[0 if of_all_tokens else spec.num_unseen(last) :])
        for its, spec in zip(content.slots, specs, strict=True)
    )
    return str(hash((seen, tuple(content.state)))).encode()


def seen_tokens(token_ids: Sequence[int], media: Sequence[MediaSegment]) -> list[int]:
    """Return the tokens, with numbers of encodings in place of placeholders."""
    seen = list(token_ids)
    for segment in media:
        for place in range(segment.num_tokens):
            row = int.from_bytes(segment.digest) + segment.first + place
            seen[segment.start + place] = row
    return seen


class KvTensor:
    """KV blocks. New memory contains garbage."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [[GARBAGE] * block_size for _ in range(num_blocks)]

    def read(self, block_ids: Sequence[BlockId], positions: range) -> list[Slot]:
        slots: list[Slot] = []
        start = positions.start
        while start < positions.stop:
            place = start % self.block_size
            end = min(positions.stop, start - place + self.block_size)
            slots += self._block(block_ids, start)[place : place + end - start]
            start = end
        return slots

    def write(self, block_ids: Sequence[BlockId], position: int, slot: Slot) -> None:
        self._block(block_ids, position)[position % self.block_size] = slot

    def read_state(self, block_ids: BlockIds) -> list[Slot]:
        """Read the parts of a state, which must all be there, one in each block."""
        return [self.blocks[block_id][0] for block_id in block_ids]

    def write_state(self, block_ids: BlockIds, state: Sequence[Slot]) -> None:
        for block_id, part in zip(block_ids, state, strict=True):
            self.blocks[block_id] = [part] * self.block_size

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
    state: StateBlocks | None


class CrashPlace(Enum):
    START = "when the row is made"
    PASS = "in the pass, after the rows before it"
    RESULT = "once all rows are computed, when the result is collected"


class Crash(Exception):
    """Injected error that only one request triggers."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Pass that was computed when it was launched."""

    result: RunResult

    def allows(self, plan: Plan) -> bool:
        return False

    def collect(self) -> RunResult:
        return self.result


class SynchronousRunner(ABC):
    """Runner that computes a pass when it is launched."""

    __slots__ = ()

    @abstractmethod
    def run(self, plan: Plan) -> RunResult: ...

    def launch(self, plan: Plan) -> Pending:
        return Finished(self.run(plan))


def run_plan(runner: Runner, plan: Plan) -> RunResult:
    return runner.launch(plan).collect()


@dataclass(slots=True)
class FakeRunner(SynchronousRunner):
    """Runner that keeps batch rows from plan to plan, as the real one does.

    As on a GPU, a pass can be launched before the one before is collected. It then also computes
    rows that got no token in that one.
    """

    can_be_followed: ClassVar[bool] = True  # passes without drafts, by others without drafts

    kv: KvTensor
    vocab_size: int
    specs: Specs = ONE_FULL
    num_state_blocks: int = 0
    # With speculation: how many drafted tokens a step may confirm, drawn by `chance`.
    num_lookahead_tokens: int = 0
    # The real runner's block tables are this long, and not a block longer. None: any length.
    max_model_len: int | None = None
    max_num_seqs: int | None = None  # rows; None: any number
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    failing: set[RequestId] = field(default_factory=set)  # their next token is an error
    crashing: dict[RequestId, CrashPlace] = field(default_factory=dict)  # their pass fails
    num_computed: dict[RequestId, int] = field(default_factory=dict)  # tokens run, per request
    num_followed: int = 0  # passes that were launched before the one before was collected
    _open: FakePass | None = None  # the pass that is not collected
    _follows: bool = False  # the pass in progress follows one that is not collected
    max_loras: int | None = None  # different adapters of a pass; None: any number
    # Pooled rows need all tokens, which their passes must compute.
    pools_all_tokens: bool = False
    whole_pictures: bool = False  # all tokens of a picture must be in one pass
    max_rows: int = 16  # with more tokens, a pass has no drafts
    num_encoded: int = 0  # pictures
    num_read: int = 0  # encodings in blocks
    _encodings: set[bytes] = field(default_factory=set)  # by digest
    _num_drafts_left: int = 0  # in this step
    _rows: dict[RequestId, _Row] = field(default_factory=dict)
    _pooled: dict[RequestId, Content] = field(default_factory=dict)  # what passes have computed
    _forgotten: set[RequestId] = field(default_factory=set)  # after a pass that failed
    _ended: set[RequestId] = field(default_factory=set)  # with the last pass, by the runner's rules

    def max_drafts(self, plan: Plan) -> int:
        """Return the most draft tokens of a pass."""
        if not self.num_lookahead_tokens:
            return 0
        num_rows_left = self.max_rows - sum(plan.num_scheduled_tokens.values())
        return max(0, min(num_rows_left, plan.max_draft_tokens))

    def launch(self, plan: Plan) -> Pending:
        self._follows = self._open is not None and not plan.is_retry
        self.num_followed += self._follows
        self._open = None
        pooled = {request_id: content.copy() for request_id, content in self._pooled.items()}
        launched = FakePass(self, plan, self.run(plan), pooled)
        self._follows = False
        self._open = launched
        return launched

    def collect(self, launched: FakePass) -> RunResult:
        if self._open is launched:
            self._open = None
        try:
            for request_id in launched.plan.num_scheduled_tokens:
                self._crash_if_due(request_id, CrashPlace.RESULT)
        except Crash:
            self._pooled = launched.pooled_before
            raise
        return launched.result

    def pools(self, plan: Plan) -> bool:
        """Return whether a pass pools texts, whose sums are kept when it is collected."""
        rows = map(self._rows.get, plan.num_scheduled_tokens)
        return any(row is not None and row.row.task.is_pooling for row in rows)

    def run(self, plan: Plan) -> RunResult:
        result = RunResult()
        self._encode(plan.media)
        self._drop(plan)
        for row in plan.started:
            self._forgotten.discard(row.request_id)
            if plan.is_retry:
                self._rows.pop(row.request_id, None)
            if row.request_id in self._rows:
                raise AssertionError(f"{row.request_id} started twice")
            self._crash_if_due(row.request_id, CrashPlace.START)
            tables = [list(table) for table in row.block_tables]
            self._rows[row.request_id] = _Row(
                row, list(row.token_ids), row.num_computed_tokens, tables, row.state
            )
            if self.max_num_seqs is not None and len(self._rows) > self.max_num_seqs:
                raise AssertionError(f"there is no room for {row.request_id}")
        for request_id, added in plan.new_block_ids.items():
            for table, block_ids in zip(self._rows[request_id].block_tables, added, strict=True):
                table += block_ids
        for request_id in [row.request_id for row in plan.started] + list(plan.new_block_ids):
            self._check_table(self._rows[request_id])
        self._num_drafts_left = self.max_drafts(plan)
        self._run_rows(plan, result)
        return result

    def _encode(self, media: MediaOrders) -> None:
        self._encodings.difference_update(media.freed)
        ordered = {each.digest: each for sources in media.encoded.values() for each in sources}
        for digest, source in ordered.items():
            if digest in self._encodings:
                continue
            if isinstance(source, StoredEncoding):
                self._check_stored(source)
                self.num_read += 1
            else:
                self.num_encoded += 1
        self._encodings.update(ordered)

    def _check_stored(self, stored: StoredEncoding) -> None:
        """Check that the blocks hold the encoding, and not what somebody has written since."""
        group = next(number for number, spec in enumerate(self.specs) if not spec.forgets)
        prompt = StoredPicture(stored.digest, len(stored.block_ids), self.kv.block_size)
        positions = range(prompt.num_cached_tokens)
        seen = seen_tokens(prompt.token_ids[: positions.stop], prompt.media)
        expected = content_of(seen, self.specs, self.num_state_blocks).slots[group]
        if self.kv.read(stored.block_ids, positions) != expected:
            raise AssertionError(f"blocks {stored.block_ids} do not hold the encoding")

    def _drop(self, plan: Plan) -> None:
        for request_id in plan.dropped:
            if not plan.is_retry:
                self._pooled.pop(request_id, None)
            if plan.is_retry or request_id in self._forgotten:
                self._rows.pop(request_id, None)
            else:
                del self._rows[request_id]
        self._forgotten.difference_update(() if plan.is_retry else plan.dropped)
        self._forgotten.update(plan.dropped if plan.is_retry else ())

    def _run_rows(self, plan: Plan, result: RunResult) -> None:
        written, ended = self._state_written_by(plan), self._ended
        self._ended = set()
        self._check_adapters(plan)
        pooled = {request_id: content.copy() for request_id, content in self._pooled.items()}
        try:
            for request_id, num_tokens in plan.num_scheduled_tokens.items():
                snapshots = plan.state_copies.get(request_id, ())
                if request_id in ended:  # the scheduler did not know that
                    if self._follows:  # nor did the runner
                        row = self._rows[request_id]
                        self._spoil(row, range(len(row.token_ids), len(row.token_ids) + 1))
                        self._swap_sides(row, [GARBAGE] * self.num_state_blocks)
                        self._spoil_state(row, snapshots)
                    continue
                self._run_row(self._rows[request_id], num_tokens, snapshots, result)
        except Crash:
            self.kv.spoil(written)
            self._pooled = pooled
            raise

    def _check_adapters(self, plan: Plan) -> None:
        rows = [self._rows[request_id].row for request_id in plan.num_scheduled_tokens]
        adapters = {row.adapter for row in rows} - {""}
        if self.max_loras is not None and len(adapters) > self.max_loras:
            raise AssertionError(f"there are no places for {adapters}")

    def _state_written_by(self, plan: Plan) -> list[BlockId]:
        states = [self._rows[request_id].state for request_id in plan.num_scheduled_tokens]
        sides = [side for state in states if state is not None for side in state.sides[1:]]
        taken = [snapshot.block_ids for its in plan.state_copies.values() for snapshot in its]
        return [block_id for block_ids in (*sides, *taken) for block_id in block_ids]

    def _crash_if_due(self, request_id: RequestId, place: CrashPlace) -> None:
        if self.crashing.get(request_id) is place:
            raise Crash(request_id)

    def _run_row(
        self, row: _Row, num_tokens: int, snapshots: Sequence[StateSnapshot], result: RunResult
    ) -> None:
        request_id = row.row.request_id
        self._crash_if_due(request_id, CrashPlace.PASS)
        end = row.num_computed_tokens + num_tokens
        if not row.num_computed_tokens < end <= len(row.token_ids):
            raise AssertionError(f"{request_id} has no tokens up to {end}")
        content = self._compute(row, end, snapshots)
        self.num_computed[request_id] = self.num_computed.get(request_id, 0) + num_tokens
        self._give_prompt_logprobs(row, end - num_tokens, end, result)
        if end < len(row.token_ids):
            return
        if request_id in self.failing:
            self.failing.discard(request_id)
            self._spoil(row, range(end - num_tokens, end))
            self._spoil_state(row, snapshots)
            self._ended.add(request_id)
            result.failures[request_id] = Failure("the logits are not finite")
            return
        if row.row.task.is_pooling:
            content = self._pooled.get(request_id, content)
            result.vectors[request_id] = vector_of(content, self.specs, self.pools_all_tokens)
            return
        num_drafts = self._num_drafts(row, num_tokens)
        result.token_ids[request_id] = self._sample(row, content, num_drafts)
        if num_drafts:
            result.num_proposed[request_id] = num_drafts
            if len(row.token_ids) >= self._max_len(row):
                self._ended.add(request_id)
        if row.row.sampling.logprobs is not None:
            result.logprobs[request_id] = [logprob_of(t) for t in result.token_ids[request_id]]

    def _compute(self, row: _Row, end: int, snapshots: Sequence[StateSnapshot] = ()) -> Content:
        """Compute the tokens up to `end` from the blocks that they see. Returns all content."""
        start = row.num_computed_tokens
        if not self.specs:
            return self._compute_whole(row, end)
        content = empty_content(self.specs, self.num_state_blocks, row.row.adapter)
        if start and row.state is not None:
            content.state = self.kv.read_state(row.state.snapshot or row.state.sides[0])
        for its, table, spec in zip(content.slots, row.block_tables, self.specs, strict=True):
            num_unseen = spec.num_unseen(start)
            its += [GARBAGE] * num_unseen + self.kv.read(table, range(num_unseen, start))
        blocks_by_end = dict(snapshots)
        assert all(start < num_tokens <= end for num_tokens in blocks_by_end)
        self._check_pictures(row, start, end)
        seen = seen_tokens(row.token_ids, row.row.media)
        for position in range(start, end):
            content.append(seen[position], self.specs)
            for table, its in zip(row.block_tables, content.slots, strict=True):
                self.kv.write(table, position, its[-1])
            if position + 1 in blocks_by_end:
                self.kv.write_state(blocks_by_end[position + 1], content.state)
        row.num_computed_tokens = end
        self._swap_sides(row, content.state)
        if row.row.task.is_pooling and self.pools_all_tokens:
            self._note_pooled(row, start, content)
        return content

    def _check_pictures(self, row: _Row, start: int, end: int) -> None:
        for segment in row.row.media:
            if segment.overlaps(start, end) and segment.digest not in self._encodings:
                raise AssertionError(f"a picture of {row.row.request_id} is not encoded")
            stop = segment.start + segment.num_tokens
            is_cut = any(segment.start < place < stop for place in (start, end))
            if self.whole_pictures and is_cut:
                raise AssertionError(f"{start} to {end} of {row.row.request_id} cut a picture")

    def _compute_whole(self, row: _Row, end: int) -> Content:
        """Compute a text as an encoder does, which keeps nothing of it."""
        if row.num_computed_tokens or end < len(row.token_ids) or row.block_tables:
            raise AssertionError(f"{row.row.request_id} is not computed whole, without blocks")
        row.num_computed_tokens = end
        return content_of(row.token_ids, self.specs, 0, row.row.adapter)

    def _note_pooled(self, row: _Row, start: int, content: Content) -> None:
        nothing = empty_content(self.specs, self.num_state_blocks)
        noted = self._pooled.setdefault(row.row.request_id, nothing)
        if start != len(noted.slots[0]):
            raise AssertionError(f"{row.row.request_id} has no sum of the tokens before {start}")
        for its, computed in zip(noted.slots, content.slots, strict=True):
            its += computed[start:]
        noted.state = content.state.copy()

    def _swap_sides(self, row: _Row, state: Sequence[Slot]) -> None:
        if row.state is not None:
            first, *others = row.state.sides
            self.kv.write_state(others[0], state)
            row.state = StateBlocks((*others, first))

    def _spoil_state(self, row: _Row, snapshots: Sequence[StateSnapshot]) -> None:
        """Write garbage to all state that the pass has just written."""
        if row.state is not None:
            self.kv.spoil(row.state.sides[0])
        for snapshot in snapshots:
            self.kv.spoil(snapshot.block_ids)

    def _spoil(self, row: _Row, positions: range) -> None:
        for table in row.block_tables:
            for position in positions:
                self.kv.write(table, position, GARBAGE)

    def _num_drafts(self, row: _Row, num_tokens: int) -> int:
        """Return the number of draft tokens for a row, as the real runner computes it."""
        known = len(row.token_ids)
        if num_tokens != 1 or known <= row.row.num_prompt_tokens:
            return 0
        most = min(self.num_lookahead_tokens, self._num_drafts_left)
        num_slots = len(row.block_tables[0]) * self.kv.block_size
        num_drafts = max(0, min(most, self._max_len(row) - known - 1, num_slots - known))
        self._num_drafts_left -= num_drafts
        return num_drafts

    def _max_len(self, row: _Row) -> int:
        longest = row.row.num_prompt_tokens + row.row.sampling.max_tokens
        return longest if self.max_model_len is None else min(longest, self.max_model_len)

    def _check_table(self, row: _Row) -> None:
        if self.max_model_len is None:
            return
        num_places = -(-self.max_model_len // self.kv.block_size)
        for table in row.block_tables:
            if len(table) != len(row.block_tables[0]) or len(table) > num_places:
                raise AssertionError(
                    f"{row.row.request_id} has {len(table)} blocks; tables hold {num_places}"
                )

    def _sample(self, row: _Row, content: Content, num_drafts: int) -> list[int]:
        """Sample a token and accepted drafts. Write garbage for rejected drafts."""
        answer = [next_token(content, row.row.seed, self.vocab_size, self.specs)]
        row.token_ids.append(answer[0])
        num_confirmed = self.chance.randint(0, num_drafts) if num_drafts else 0
        for _ in range(num_confirmed):
            content = self._compute(row, len(row.token_ids))
            answer.append(next_token(content, row.row.seed, self.vocab_size, self.specs))
            row.token_ids.append(answer[-1])
        first_rejected = len(row.token_ids) - 1
        num_rejected = num_drafts - num_confirmed
        self._spoil(row, range(first_rejected, first_rejected + num_rejected))
        if row.state is not None:
            for side in row.state.sides[1 : 1 + num_rejected]:
                self.kv.spoil(side)
        return answer

    def _give_prompt_logprobs(self, row: _Row, start: int, end: int, result: RunResult) -> None:
        end = min(end, row.row.num_prompt_tokens)
        if row.row.sampling.prompt_logprobs is None or start >= end:
            return
        result.prompt_logprobs[row.row.request_id] = [
            logprob_of(row.token_ids[place]) if place else None for place in range(start, end)
        ]


@dataclass(frozen=True, slots=True)
class FakePass:
    """Implements `Pending`."""

    runner: FakeRunner
    plan: Plan
    result: RunResult
    pooled_before: dict[RequestId, Content]

    def allows(self, plan: Plan) -> bool:
        if not self.runner.can_be_followed or self.result.num_proposed:
            return False
        if self.runner.pools(self.plan):
            return False
        is_pass = bool(self.plan.num_scheduled_tokens and plan.num_scheduled_tokens)
        return is_pass and not plan.is_retry and not self.runner.max_drafts(plan)

    def collect(self) -> RunResult:
        return self.runner.collect(self)


def logprob_of(token_id: int) -> TokenLogprobs:
    """Return a logprob that differs between tokens."""
    return TokenLogprobs(token_id, logprob=-0.5 - token_id, rank=1)


def _of_one(by_group: tuple[object, ...]) -> object:
    """Return the only group's element: tests rely on the tokens of models with one group."""
    return by_group[0] if len(by_group) == 1 else by_group
