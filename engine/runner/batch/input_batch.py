"""Persistent batch: the runner's per-request state, updated in place between steps.

Loops over rows are plain Python. After a pass over the weights the CPU caches are cold, and a numpy
call then costs as much as dozens of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.core.errors import InvalidConfig
from baton.core.ids import RequestId
from baton.engine.errors import RowOverflow
from baton.engine.plan import BlockTables, Plan, PlanRow
from baton.engine.runner.batch.unknown_tokens import UnknownTokens
from baton.engine.runner.model.pass_layout import Ints, PassLayout, TokenRun, picture_ends
from baton.engine.runner.model.token_counts import TokenCounts
from baton.engine.runner.state.state_tables import NO_SNAPSHOTS, Snapshots, StateLayout, StateTables
from baton.engine.spec_decode.proposer import Drafts

NO_DRAFTS: Drafts = {}


@dataclass(frozen=True, slots=True)
class Step:
    """Input of one forward pass, and the runs whose last token is sampled.

    A row with a draft has one run for its newest token and one for each drafted token, in this
    order. Each run has the same context and is computed in the same way as in a step of its own.
    """

    runs: tuple[TokenRun, ...]  # in the order of the flat batch
    layout: PassLayout
    token_ids: Ints  # by token
    sampled: tuple[int, ...]  # indices into runs
    drafts: Drafts = field(default_factory=dict)  # whose tokens are among the runs
    states: StateLayout | None = None  # if the model has recurrent layers
    unknown: UnknownTokens | None = None  # tokens that only the device has

    @property
    def max_len(self) -> int:
        """Length of the longest sequence. Counted here: reading it from a GPU would wait for it."""
        return max([run.end for run in self.runs])

    @property
    def seen_lens(self) -> Ints:
        """Sequence length at which each token is first computed, by token."""
        num_prompt = np.array([run.row.num_prompt_tokens for run in self.runs], dtype=np.int64)
        by_token = num_prompt.repeat(self.layout.num_queries)
        return np.maximum(by_token, self.layout.positions + 1)


class PersistentBatch:
    """Rows by slot. The cost of a step depends on the scheduled rows, not on the batch size."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_kv_groups: int = 1,
        num_state_blocks: int = 0,
        num_state_sides: int = 2,
        *,
        sees_whole_pictures: bool = False,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self._max_model_len = max_model_len
        self._sees_whole_pictures = sees_whole_pictures
        # Pages that no request has touched take no memory.
        self._tokens: Ints = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self._tokens_by_slot: list[Ints] = list(self._tokens)
        self._blocks: Ints = np.zeros((num_kv_groups, max_num_seqs, max_blocks), dtype=np.int64)
        self._states = None
        if num_state_blocks:
            self._states = StateTables(max_num_seqs, num_state_blocks, num_state_sides)
        self._num_tokens = [0] * max_num_seqs
        self._num_computed = [0] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._rows: dict[RequestId, PlanRow] = {}
        self._slots: dict[RequestId, int] = {}
        self._counts: dict[RequestId, TokenCounts] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, plan: Plan) -> None:
        self._forget(plan.dropped)
        if plan.is_retry:
            self._forget([row.request_id for row in plan.started])
        for row in plan.started:
            self._start(row)
        for request_id, block_tables in plan.new_block_ids.items():
            self._append_blocks(request_id, block_tables)

    def step(
        self,
        num_scheduled_tokens: Mapping[RequestId, int],
        drafts: Drafts = NO_DRAFTS,
        snapshots: Snapshots = NO_SNAPSHOTS,
    ) -> Step:
        self._append_drafts(drafts)
        runs = tuple(sorted(self._runs(num_scheduled_tokens, drafts), key=self._flat_order))
        slots = np.array([run.slot for run in runs], dtype=np.int64)
        num_queries = np.array([run.num_tokens for run in runs], dtype=np.int64)
        layout = self._layout(runs, slots, num_queries)
        return Step(
            runs=runs,
            layout=layout,
            token_ids=self._tokens[slots.repeat(num_queries), layout.positions],
            sampled=tuple(
                [at for at, run in enumerate(runs) if run.end >= self._num_tokens[run.slot]]
            ),
            drafts=drafts,
            states=None if self._states is None else self._states.layout(runs, snapshots),
        )

    def advance(self, step: Step) -> None:
        """Mark the tokens of a finished pass as computed."""
        for run in step.runs:
            self._num_computed[run.slot] = run.end
        if self._states is not None:
            for slot in {run.slot for run in step.runs}:
                self._states.advance(slot)

    def append(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Append sampled tokens: the accepted drafts, then the next input token."""
        slot, count = self._slots[request_id], len(token_ids)
        first = self._num_tokens[slot]
        self._check_tokens(request_id, first + count)
        self._tokens[slot, first : first + count] = token_ids
        self._num_tokens[slot] = first + count
        self._num_computed[slot] = first + count - 1  # rejected drafts do not count
        if self._states is not None and count > 1:
            self._states.advance(slot, count - 1)

    def expect(self, runs: Iterable[TokenRun]) -> None:
        """Append a token to each row that these runs sample, before its number is known."""
        for run in runs:
            self._check_tokens(run.row.request_id, run.end + 1)
            self._num_tokens[run.slot] = run.end + 1

    def receive(
        self, runs: Iterable[TokenRun], token_ids: Mapping[RequestId, Sequence[int]]
    ) -> None:
        """Fill in the tokens that were expected of these runs, if their rows are still there."""
        for run in runs:
            request_id = run.row.request_id
            if request_id in token_ids and self._rows.get(request_id) is run.row:
                [self._tokens[run.slot, run.end]] = token_ids[request_id]

    def find_row(self, request_id: RequestId) -> PlanRow | None:
        return self._rows.get(request_id)

    def known_tokens(self, request_id: RequestId) -> Ints:
        """Return a view of prompt and outputs."""
        slot = self._slots[request_id]
        return self._tokens[slot, : self._num_tokens[slot]]

    def newest_run(self, request_id: RequestId) -> TokenRun:
        """Return the run of the newest known token."""
        row, slot = self._rows[request_id], self._slots[request_id]
        return TokenRun(row, slot, 1, self._num_tokens[slot], self._tokens_by_slot[slot])

    def layout_of(self, runs: Sequence[TokenRun]) -> PassLayout:
        """Return the layout of a pass over these runs, whose positions must have slots."""
        slots = np.array([run.slot for run in runs], dtype=np.int64)
        return self._layout(runs, slots, np.array([run.num_tokens for run in runs], np.int64))

    def decoding(self, num_scheduled_tokens: Mapping[RequestId, int]) -> Iterator[PlanRow]:
        """Yield the rows that decode: only their newest token, an output, is scheduled."""
        for request_id, num_tokens in num_scheduled_tokens.items():
            if num_tokens != 1:
                continue
            row, slot = self._rows[request_id], self._slots[request_id]
            known = self._num_tokens[slot]
            if known > row.num_prompt_tokens and self._num_computed[slot] + 1 == known:
                yield row

    def max_draft_len(self, row: PlanRow) -> int:
        """Return the number of draft tokens that fit after the newest token."""
        slot = self._slots[row.request_id]
        known = self._num_tokens[slot]
        num_slots = self._num_blocks[slot] * self.block_size
        return max(0, min(self._max_len(row) - known - 1, num_slots - known))

    def is_full(self, request_id: RequestId) -> bool:
        """Return whether a row has all tokens that it can get: its request ends."""
        row, slot = self._rows[request_id], self._slots[request_id]
        return self._num_tokens[slot] >= self._max_len(row)

    def _max_len(self, row: PlanRow) -> int:
        return min(row.num_prompt_tokens + row.sampling.max_tokens, self._max_model_len)

    def _forget(self, request_ids: Sequence[RequestId]) -> None:
        """Remove rows and free their slots. Unknown ids, as after a failed pass, are ignored."""
        for request_id in request_ids:
            if self._rows.pop(request_id, None) is not None:
                self._free_slots.append(self._slots.pop(request_id))
                self._counts.pop(request_id, None)

    def _start(self, row: PlanRow) -> None:
        num_tokens, room = len(row.token_ids), self._tokens.shape[1]
        if num_tokens >= room or not self._free_slots:
            raise InvalidConfig(
                f"{row.request_id} with {num_tokens} tokens does not fit: the runner holds "
                f"{self._tokens.shape[0]} requests of up to {room - 1} tokens"
            )
        slot = self._free_slots[-1]
        if self._states is not None:
            self._states.start(slot, row)
        self._free_slots.pop()
        self._rows[row.request_id] = row
        self._slots[row.request_id] = slot
        self._tokens[slot, :num_tokens] = row.token_ids
        if row.sampling.has_penalty:
            self._counts[row.request_id] = TokenCounts(row.num_prompt_tokens)
        self._num_tokens[slot] = num_tokens
        self._num_computed[slot] = row.num_computed_tokens
        self._num_blocks[slot] = 0
        self._append_blocks(row.request_id, row.block_tables)

    def _append_drafts(self, drafts: Drafts) -> None:
        """Write the drafts after the known tokens without counting them."""
        for request_id, draft in drafts.items():
            slot = self._slots[request_id]
            first = self._num_tokens[slot]
            self._check_tokens(request_id, first + len(draft))
            self._tokens[slot, first : first + len(draft)] = draft

    def _runs(
        self,
        num_scheduled_tokens: Mapping[RequestId, int],
        drafts: Drafts,
    ) -> Iterator[TokenRun]:
        for request_id, num_tokens in num_scheduled_tokens.items():
            row, slot = self._rows[request_id], self._slots[request_id]
            end = self._num_computed[slot] + num_tokens
            num_slots = self._num_blocks[slot] * self.block_size
            # Without this check, KV would be written into the blocks of an earlier row.
            if end + len(drafts.get(request_id, ())) > num_slots:
                raise RowOverflow(
                    f"{request_id} is scheduled up to token {end}; its blocks hold {num_slots}"
                )
            tokens, counts = self._tokens_by_slot[slot], self._counts.get(request_id)
            for ahead in range(1 + len(drafts.get(request_id, ()))):
                yield TokenRun(row, slot, num_tokens, end + ahead, tokens, counts=counts)

    def _append_blocks(self, request_id: RequestId, block_tables: BlockTables) -> None:
        slot = self._slots[request_id]
        first, end = self._num_blocks[slot], self._num_blocks[slot] + len(block_tables[0])
        # numpy clips a slice at the end of the row, and would drop a single block silently.
        if end > self._blocks.shape[2]:
            raise RowOverflow(
                f"{request_id} was given {end} blocks; block tables hold "
                f"{self._blocks.shape[2]}, enough for max_model_len {self._max_model_len}"
            )
        for table, block_ids in zip(self._blocks, block_tables, strict=True):
            table[slot, first:end] = block_ids
        self._num_blocks[slot] = end

    def _check_tokens(self, request_id: RequestId, num_tokens: int) -> None:
        """Raise RowOverflow if a row cannot hold `num_tokens`: numpy might drop one silently."""
        if num_tokens > self._tokens.shape[1]:
            raise RowOverflow(
                f"{request_id} would have {num_tokens} tokens; rows hold {self._tokens.shape[1]}"
            )

    def _layout(self, runs: Sequence[TokenRun], slots: Ints, num_queries: Ints) -> PassLayout:
        context_lens = [run.end for run in runs]
        positions = np.array([position for run in runs for position in run.positions], np.int64)
        return PassLayout(
            num_queries=num_queries,
            context_lens=np.array(context_lens, dtype=np.int64),
            block_tables=self._blocks[:, slots, : -(-max(context_lens) // self.block_size)],
            positions=positions,
            write_blocks=self._blocks[:, slots.repeat(num_queries), positions // self.block_size],
            write_offsets=positions % self.block_size,
            seen_ends=picture_ends(runs, positions) if self._sees_whole_pictures else None,
        )

    def _flat_order(self, run: TokenRun) -> tuple[int, ...]:
        """Sort key: single tokens first, then by context length, so that similar runs are adjacent.

        With recurrent layers, the drafts of a row follow its newest token.
        """
        if self._states is None:
            return run.num_tokens != 1, run.end
        newest = min(run.end, self._num_tokens[run.slot])
        return run.num_tokens != 1, newest, run.slot, run.end
