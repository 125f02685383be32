"""Recurrent state in blocks: two sides, snapshots, repeated passes and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockId, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.errors import RowOverflow
from baton.engine.plan import Plan, PlanRow, StateBlocks, StateSnapshot
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from tests.support.fake_runner import run_plan
from tests.support.families import STATE_VARIANTS
from tests.support.models import make_model_folder, prompt_of
from tests.support.triton_parts import require_triton

NAME = RequestId("r")
PROMPT = prompt_of(40)
SAMPLING = SamplingParams(temperature=0.0, logprobs=3)
KV_BLOCKS = (0, 1, 2)
FIRST, SECOND, SNAPSHOT = (20, 7), (9, 12), (15, 4)  # two blocks each, no neighbours


def ids(blocks: tuple[int, ...]) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, blocks))


ROW = PlanRow(
    NAME,
    PROMPT,
    40,
    0,
    (ids(KV_BLOCKS),),
    SAMPLING,
    0,
    state=StateBlocks((ids(FIRST), ids(SECOND))),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3.5"), STATE_VARIANTS["qwen3.5"])


@pytest.fixture
def runner(folder: Path, request: pytest.FixtureRequest) -> Iterator[TorchRunner]:
    kernels = getattr(request, "param", "auto")
    if kernels == "triton":
        require_triton()
    with load_runner(RunnerConfig(str(folder), kv_cache_bytes=1 << 20, kernels=kernels)) as runner:
        yield runner


each_kernels = pytest.mark.parametrize(
    "runner", ["auto", pytest.param("triton", marks=pytest.mark.triton)], indirect=True
)


def blocks_of(runner: TorchRunner, blocks: tuple[int, ...]) -> bytes:
    return b"".join(map(bytes, runner.blocks.read(ids(blocks))))


def plan(num_tokens: int, row: PlanRow | None = None, *snapshots: StateSnapshot) -> Plan:
    started = () if row is None else (row,)
    found = {NAME: snapshots} if snapshots else {}
    return Plan(started=started, num_scheduled_tokens={NAME: num_tokens}, state_copies=found)


@each_kernels
def test_each_pass_writes_the_other_state_side(runner: TorchRunner) -> None:
    untouched = blocks_of(runner, FIRST)

    run_plan(runner, plan(24, ROW))
    after_first = blocks_of(runner, SECOND)
    assert blocks_of(runner, FIRST) == untouched
    run_plan(runner, plan(16))

    assert blocks_of(runner, SECOND) == after_first
    assert blocks_of(runner, FIRST) != untouched


@each_kernels
def test_a_repeated_pass_gives_the_same_result(runner: TorchRunner) -> None:
    """After a pass whose result was lost, too: its sides were swapped in the runner alone."""
    run_plan(runner, plan(24, ROW))
    expected, state = run_plan(runner, plan(16)), blocks_of(runner, FIRST)
    row = replace(ROW, num_computed_tokens=24, state=StateBlocks((ids(SECOND), ids(FIRST))))

    again = run_plan(runner, replace(plan(16, row), is_retry=True))

    assert again == expected
    assert blocks_of(runner, FIRST) == state


@each_kernels
def test_a_snapshot_is_the_state_at_its_position(runner: TorchRunner) -> None:
    inside, end = StateSnapshot(16, ids(SNAPSHOT)), StateSnapshot(32, ids((30, 31)))
    run_plan(runner, plan(32, ROW, end, inside))
    snapshot, after = blocks_of(runner, SNAPSHOT), blocks_of(runner, (30, 31))
    assert after == blocks_of(runner, SECOND)
    expected = run_plan(runner, plan(8))

    row = replace(
        ROW,
        num_computed_tokens=16,
        state=StateBlocks((ids((40, 41)), ids((42, 43))), ids(SNAPSHOT)),
    )
    found = run_plan(runner, replace(plan(24, row), dropped=(NAME,)))

    assert found.token_ids == expected.token_ids
    assert found.logprobs[NAME][0].logprob == pytest.approx(
        expected.logprobs[NAME][0].logprob, abs=1e-4
    )
    assert blocks_of(runner, SNAPSHOT) == snapshot


@each_kernels
def test_reused_state_blocks_start_at_zero(runner: TorchRunner) -> None:
    expected = run_plan(runner, plan(40, ROW))
    runner.blocks.kv[[*FIRST, *SECOND, *KV_BLOCKS]] = torch.nan

    assert run_plan(runner, replace(plan(40, ROW), dropped=(NAME,))) == expected


@pytest.mark.parametrize(
    "row",
    [
        replace(ROW, state=None),
        replace(ROW, state=StateBlocks((ids(FIRST), ids(SECOND[:1])))),
        replace(ROW, state=StateBlocks((ids(FIRST), ids(SECOND)), ids(SNAPSHOT[:1]))),
    ],
)
def test_a_row_without_all_of_its_state_is_refused(runner: TorchRunner, row: PlanRow) -> None:
    with pytest.raises(InvalidConfig, match=r"takes 2( sides of 2)?"):
        run_plan(runner, plan(40, row))

    assert run_plan(runner, plan(40, ROW)).token_ids


@pytest.mark.parametrize("num_tokens", [0, 33])
def test_a_snapshot_outside_of_the_pass_is_refused(runner: TorchRunner, num_tokens: int) -> None:
    with pytest.raises(RowOverflow, match=f"a snapshot after {num_tokens} tokens"):
        run_plan(runner, plan(32, ROW, StateSnapshot(num_tokens, ids(SNAPSHOT))))


def test_the_kv_memory_describes_the_state(runner: TorchRunner) -> None:
    memory = runner.kv_memory
    assert memory.layout.num_state_blocks == 2
    assert memory.num_tokens == (memory.num_blocks - 4) * 16
    assert memory.layout.state_packing == "state: 3 layers of 4x12x20 float32 and 3x128 float32"


def test_a_cache_without_room_for_a_state_is_refused(folder: Path) -> None:
    with load_runner(RunnerConfig(str(folder), kv_cache_bytes=1 << 20)) as runner:
        num_bytes = runner.kv_memory.block_bytes
    load_runner(RunnerConfig(str(folder), kv_cache_bytes=5 * num_bytes)).__exit__(None, None, None)

    with pytest.raises(InvalidConfig, match="no block of tokens and the recurrent state"):
        load_runner(RunnerConfig(str(folder), kv_cache_bytes=5 * num_bytes - 1))


def test_a_block_smaller_than_a_state_row_is_refused_with_the_remedy(tmp_path: Path) -> None:
    variant = STATE_VARIANTS["qwen3.5"]
    wide = replace(variant, settings={**variant.settings, "linear_value_head_dim": 200})
    folder = make_model_folder(tmp_path / "wide", wide)
    remedy = "smaller than a row of this model's recurrent state .800 bytes.: use at least 2 tokens"
    with pytest.raises(InvalidConfig, match=remedy):
        load_runner(RunnerConfig(str(folder), block_size=1, kv_cache_bytes=1 << 20))
