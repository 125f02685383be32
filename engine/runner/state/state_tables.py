"""State blocks of the rows of a batch, and the runs of tokens between two states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baton.core.errors import InvalidConfig
from baton.core.ids import RequestId
from baton.engine.errors import RowOverflow
from baton.engine.plan import PlanRow, StateSnapshot
from baton.engine.runner.model.pass_layout import Ints, TokenRun

ZEROS = -1  # instead of blocks: a state of zeros
Snapshots = Mapping[RequestId, Sequence[StateSnapshot]]
NO_SNAPSHOTS: Snapshots = {}


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Runs of tokens of a pass, with the blocks of the state before and after each.

    Arrays are by run unless noted. The runs of a sequence follow each other. One ends at each
    snapshot and before each draft, and the next one reads what it writes.
    """

    first_tokens: Ints  # in the flat batch
    num_tokens: Ints  # 0 for a run that only copies the state
    reads: Ints  # [runs, blocks]; ZEROS for a sequence that begins
    writes: Ints  # [runs, blocks]
    first_runs: Ints  # by sequence

    @property
    def has_several_runs(self) -> bool:
        """Return whether a sequence has more than one."""
        return len(self.first_runs) != len(self.num_tokens)

    def pad(self, num_runs: int, scratch_block: int) -> StateLayout:
        """Return this batch of single tokens with more runs.

        An added one begins with zeros and writes into the scratch block.
        """
        num_own, num_blocks = self.reads.shape
        added = (num_runs - num_own, num_blocks)
        order = np.arange(num_runs)
        return StateLayout(
            first_tokens=order,
            num_tokens=np.ones(num_runs, dtype=np.int64),
            reads=np.concatenate((self.reads, np.full(added, ZEROS))),
            writes=np.concatenate((self.writes, np.full(added, scratch_block))),
            first_runs=order,
        )


def empty_states(num_blocks: int) -> StateLayout:
    """Return the layout of no sequence."""
    nothing, no_blocks = np.zeros(0, dtype=np.int64), np.zeros((0, num_blocks), dtype=np.int64)
    return StateLayout(nothing, nothing, no_blocks, no_blocks, nothing)


class StateTables:
    """State blocks by slot. A pass reads one side and writes the next one, or one per draft."""

    def __init__(self, max_num_seqs: int, num_blocks: int, num_sides: int = 2) -> None:
        self._num_blocks, self._num_sides = num_blocks, num_sides
        self._sides: Ints = np.zeros((max_num_seqs, num_sides, num_blocks), dtype=np.int64)
        self._current = [0] * max_num_seqs  # the side with the state after the computed tokens
        self._snapshots: dict[int, Ints] = {}  # that the next pass reads instead

    def start(self, slot: int, row: PlanRow) -> None:
        """Note the state blocks of a new row. Raises InvalidConfig if it lacks some."""
        found = [] if row.state is None else [len(side) for side in row.state.sides]
        if row.state is None or found != [self._num_blocks] * self._num_sides:
            raise InvalidConfig(
                f"{row.request_id} has {found or 'no'} blocks for its recurrent state;"
                f" it takes {self._num_sides} sides of {self._num_blocks}"
            )
        self._sides[slot] = row.state.sides
        self._current[slot] = 0
        self._snapshots.pop(slot, None)
        if row.state.snapshot:
            self._snapshots[slot] = self._blocks_of(row.request_id, row.state.snapshot)

    def layout(self, runs: Sequence[TokenRun], snapshots: Snapshots) -> StateLayout:
        """`runs` of a row follow each other: its newest token and its drafts."""
        parts: list[tuple[int, int, Ints, Ints]] = []  # first token, tokens, read, written
        first_runs, first_token = [], 0
        slot, num_before = -1, 0  # of the run before; the runs before it in its sequence
        for run in runs:
            num_before = num_before + 1 if run.slot == slot else 0
            slot = run.slot
            source, position = self._source(run), run.end - run.num_tokens
            if num_before:
                source = parts[-1][3]
            else:
                first_runs.append(len(parts))
            end = first_token + run.num_tokens
            for snapshot in sorted(snapshots.get(run.row.request_id, ())):
                target = self._blocks_of(run.row.request_id, snapshot.block_ids)
                num_tokens = snapshot.num_tokens - position
                if not 0 < num_tokens <= run.end - position:
                    raise RowOverflow(
                        f"{run.row.request_id}: a snapshot after {snapshot.num_tokens} tokens,"
                        f" but this pass computes those from {position} to {run.end}"
                    )
                parts.append((first_token, num_tokens, source, target))
                source, position = target, snapshot.num_tokens
                first_token += num_tokens
            turn = (self._current[slot] + 1 + num_before) % self._num_sides
            target = self._sides[slot, turn]
            parts.append((first_token, end - first_token, source, target))
            first_token = end
        first_tokens, lengths, reads, writes = zip(*parts, strict=True)
        return StateLayout(
            first_tokens=np.array(first_tokens, dtype=np.int64),
            num_tokens=np.array(lengths, dtype=np.int64),
            reads=np.stack(reads),
            writes=np.stack(writes),
            first_runs=np.array(first_runs, dtype=np.int64),
        )

    def advance(self, slot: int, num_sides: int = 1) -> None:
        """Take the next side after a successful pass, or the one of a later accepted token."""
        self._current[slot] = (self._current[slot] + num_sides) % self._num_sides
        self._snapshots.pop(slot, None)

    def _source(self, run: TokenRun) -> Ints:
        if run.end == run.num_tokens:
            return np.full(self._num_blocks, ZEROS)
        snapshot = self._snapshots.get(run.slot)
        return self._sides[run.slot, self._current[run.slot]] if snapshot is None else snapshot

    def _blocks_of(self, request_id: RequestId, block_ids: Sequence[int]) -> Ints:
        if len(block_ids) != self._num_blocks:
            raise InvalidConfig(
                f"{request_id} has a snapshot of {len(block_ids)} blocks;"
                f" its state takes {self._num_blocks}"
            )
        return np.array(block_ids, dtype=np.int64)
