"""Drivers of a runner that make plans without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.ids import NO_BLOCK, BlockId, RequestId, existing_blocks
from baton.core.output import Failure, TokenLogprobs
from baton.core.sampling import SamplingParams
from baton.engine.plan import (
    BlockIds,
    BlockTables,
    Plan,
    PlanRow,
    RunResult,
    StateBlocks,
    StateSnapshot,
)
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.structured_output.grammar import Grammar
from tests.support.fake_runner import run_plan
from tests.support.models import EOS_TOKEN_ID

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@dataclass(slots=True)
class Drive:
    """One request and its outputs so far."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    seed: int = 0
    num_tokens: int = 64  # to write
    grammar: Grammar | None = None
    adapter: str = ""  # id
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    failure: Failure | None = None
    block_tables: list[list[BlockId]] = field(default_factory=list)  # one for each KV group
    state: StateBlocks | None = None  # of a model with recurrent layers
    snapshots: dict[int, BlockIds] = field(default_factory=dict)  # by number of tokens
    num_computed: int = 0
    is_in_batch: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.outputs)

    @property
    def is_done(self) -> bool:
        return self.failure is not None or len(self.outputs) >= self.num_tokens or self._is_whole

    @property
    def _is_whole(self) -> bool:
        return self.grammar is not None and self.outputs[-1:] == [EOS_TOKEN_ID]


class Driver:
    """Scheduler without a policy: every request runs in every step.

    Blocks that no later token attends to are reused at once.
    """

    def __init__(
        self,
        runner: TorchRunner,
        *,
        num_blocks: int,
        block_size: int,
        chunk: int = 1 << 30,
        shuffle_seed: int = 0,
        snapshot_every: int = 0,  # tokens; 0 for no snapshots
    ) -> None:
        self._runner = runner
        self._num_state_blocks = runner.kv_memory.layout.num_state_blocks
        self._snapshot_every = snapshot_every
        self._specs = [group.spec for group in runner.kv_memory.layout.groups]
        self._block_size = block_size
        self._chunk = chunk
        self._free = [BlockId(block) for block in range(num_blocks)]
        # In no order, so that nothing works only because blocks are neighbours.
        random.Random(shuffle_seed).shuffle(self._free)
        self._drives: dict[RequestId, Drive] = {}
        self._dropped: list[RequestId] = []

    def add(self, drive: Drive) -> Drive:
        self._drives[drive.request_id] = drive
        return drive

    def run(self, *drives: Drive) -> list[list[int]]:
        """Run these requests to completion and return the output tokens of each."""
        for drive in drives:
            self.add(drive)
        while self._drives:
            self.step()
        self.flush()
        return [drive.outputs for drive in drives]

    def step(self) -> RunResult:
        plan = self._plan()
        result = run_plan(self._runner, plan)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._settle(self._drives[request_id], num_tokens, result)
        return result

    def preempt(self, request_id: RequestId) -> None:
        """Free the blocks of a request. The next step recomputes it with its outputs."""
        drive = self._drives[request_id]
        self._leave(drive)
        drive.num_computed = 0

    def rewind(self, request_id: RequestId, num_tokens: int) -> None:
        """Restart a request behind a snapshot, as after a prefix hit."""
        drive = self._drives[request_id]
        assert drive.state is not None
        assert num_tokens % self._block_size == 0
        num_blocks = num_tokens // self._block_size
        for table in drive.block_tables:
            self._free += table[num_blocks:]
            del table[num_blocks:]
        drive.state = drive.state._replace(snapshot=drive.snapshots[num_tokens])
        drive.num_computed = num_tokens
        drive.is_in_batch = False
        self._dropped.append(request_id)

    def flush(self) -> None:
        """Report ended requests to the runner."""
        run_plan(self._runner, Plan(dropped=self._take_dropped()))

    def _plan(self) -> Plan:
        dropped = self._take_dropped()
        started, new_blocks, scheduled = [], {}, {}
        for drive in self._drives.values():
            num_tokens = self._num_tokens(drive)
            fresh = self._allocate(drive, drive.num_computed + num_tokens)
            scheduled[drive.request_id] = num_tokens
            if not drive.is_in_batch:
                started.append(_row(drive))
                drive.is_in_batch = True
            elif fresh:
                new_blocks[drive.request_id] = fresh
        snapshots = {name: self._snapshots(name, count) for name, count in scheduled.items()}
        return Plan(dropped, tuple(started), new_blocks, scheduled, state_copies=snapshots)

    def _snapshots(self, request_id: RequestId, num_tokens: int) -> tuple[StateSnapshot, ...]:
        drive, every = self._drives[request_id], self._snapshot_every
        if not every or not self._num_state_blocks:
            return ()
        first = drive.num_computed // every + 1
        ends = range(first * every, drive.num_computed + num_tokens + 1, every)
        taken = {end: self._state_blocks() for end in ends}
        for blocks in [drive.snapshots.pop(end) for end in ends if end in drive.snapshots]:
            self._free += blocks
        drive.snapshots |= taken
        return tuple(StateSnapshot(end, blocks) for end, blocks in taken.items())

    def _state_blocks(self) -> BlockIds:
        return tuple(self._free.pop() for _ in range(self._num_state_blocks))

    def _num_tokens(self, drive: Drive) -> int:
        """Return the number of tokens to compute in the next step."""
        return min(self._chunk, len(drive.tokens) - drive.num_computed)

    def _allocate(self, drive: Drive, num_tokens: int) -> BlockTables | None:
        drive.block_tables = drive.block_tables or [[] for _ in self._specs]
        if self._num_state_blocks and drive.state is None:
            drive.state = StateBlocks((self._state_blocks(), self._state_blocks()))
        missing = -(-num_tokens // self._block_size) - len(drive.block_tables[0])
        if missing <= 0:
            return None
        fresh = tuple(tuple(self._free.pop() for _ in range(missing)) for _ in self._specs)
        for table, block_ids in zip(drive.block_tables, fresh, strict=True):
            table += block_ids
        return fresh

    def _free_unseen(self, drive: Drive) -> None:
        for table, spec in zip(drive.block_tables, self._specs, strict=True):
            for place in range(spec.num_unseen(drive.num_computed) // self._block_size):
                if table[place] != NO_BLOCK:
                    self._free.append(table[place])
                    table[place] = NO_BLOCK

    def _settle(self, drive: Drive, num_tokens: int, result: RunResult) -> None:
        drive.num_computed += num_tokens
        drive.outputs += result.token_ids.get(drive.request_id, [])
        drive.logprobs += result.logprobs.get(drive.request_id, [])
        drive.prompt_logprobs += result.prompt_logprobs.get(drive.request_id, [])
        drive.failure = result.failures.get(drive.request_id)
        self._free_unseen(drive)
        if drive.is_done:
            self._leave(drive)
            del self._drives[drive.request_id]

    def _leave(self, drive: Drive) -> None:
        # These are allocated next: their old content must not matter.
        self._free.extend(reversed(list(existing_blocks(drive.block_tables))))
        drive.block_tables = []
        states = [*drive.snapshots.values(), *(drive.state.sides if drive.state else ())]
        self._free.extend(block for blocks in states for block in blocks)
        drive.state, drive.snapshots = None, {}
        drive.is_in_batch = False
        self._dropped.append(drive.request_id)

    def _take_dropped(self) -> tuple[RequestId, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped


class RandomChunkDriver(Driver):
    """Driver with random chunk sizes and random preemptions."""

    def __init__(
        self,
        runner: TorchRunner,
        *,
        num_blocks: int,
        block_size: int,
        seed: int,
        preempted_share: float = 0.03,  # of the requests in a batch, by step
    ) -> None:
        super().__init__(runner, num_blocks=num_blocks, block_size=block_size, shuffle_seed=seed)
        self._random = random.Random(seed)
        self._preempted_share = preempted_share
        self.num_preempted = 0

    def step(self) -> RunResult:
        for drive in self._drives.values():
            if drive.is_in_batch and self._random.random() < self._preempted_share:
                self.preempt(drive.request_id)
                self.num_preempted += 1
        return super().step()

    def _num_tokens(self, drive: Drive) -> int:
        missing = super()._num_tokens(drive)
        return min(missing, self._random.choice((1, 2, 7, 16, 33, 64, missing)))


def drives_of(prompts: Sequence[Sequence[int]], **settings: object) -> list[Drive]:
    return [_drive(i, prompt, settings) for i, prompt in enumerate(prompts)]


def _drive(index: int, prompt: Sequence[int], settings: Mapping[str, object]) -> Drive:
    drive = Drive(RequestId(f"r{index}"), tuple(prompt))
    for name, value in settings.items():
        setattr(drive, name, value)
    return drive


def _row(drive: Drive) -> PlanRow:
    return PlanRow(
        request_id=drive.request_id,
        token_ids=drive.tokens,
        num_prompt_tokens=len(drive.prompt),
        num_computed_tokens=drive.num_computed,
        block_tables=tuple(map(tuple, drive.block_tables)),
        sampling=drive.sampling,
        seed=drive.seed,
        grammar=drive.grammar,
        adapter=drive.adapter,
        state=drive.state,
    )
