"""`python -m benchmarks replay` against real processes: reuse by source, sessions, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from baton.bench.load import Slo
from baton.client import AsyncClient, Retries
from baton.cluster import LocalCluster
from benchmarks.replay.config import ReplayBench
from benchmarks.replay.figures import ReplayFigures, summarise
from benchmarks.replay.run import bench_router
from benchmarks.replay.trace import ReplayTrace, TraceRequest, ordered_trace
from tests.support.baton_command import run_benchmark

BLOCK_SIZE = 16


def connect(address: str) -> AsyncClient:
    return AsyncClient(address, timeout_s=60, retries=Retries(max_attempts=1))


def sessions_of(*names: str, num_turns: int = 4, num_own_tokens: int = 100) -> ReplayTrace:
    """Return sessions whose turns add two blocks each. All are due at once, so turns must wait."""
    requests = [
        TraceRequest(
            0.0,
            1024 * turn + num_own_tokens,
            512,
            tuple(f"{name}{n}" for n in range(2 * turn)),
            name,
        )
        for name in names
        for turn in range(1, num_turns + 1)
    ]
    return ordered_trace("weka", 512, requests)


def replayed(trace: ReplayTrace, address: str, *, use_answers: bool = False) -> ReplayFigures:
    what = ReplayBench(block_tokens=BLOCK_SIZE, use_answers=use_answers)
    return summarise(bench_router(what, trace, address, connect), Slo())


def test_every_prompt_token_of_a_replay_has_a_source(cluster: LocalCluster) -> None:
    figures = replayed(sessions_of("a", "b", "c"), cluster.address)

    assert (figures.num_answered, figures.errors) == (12, {})
    assert figures.num_prompt_tokens == 3 * sum(32 * turn + 3 for turn in range(1, 5))
    assert sum(figures.tokens_by_source.values()) == figures.num_prompt_tokens
    assert "unknown" not in figures.tokens_by_source
    # The KV caches are large enough for all blocks of the turns before.
    assert figures.ideal_reuse == pytest.approx(3 * 32 * (1 + 2 + 3) / figures.num_prompt_tokens)
    assert figures.reuse == pytest.approx(figures.ideal_reuse)


def test_a_turn_waits_for_the_end_of_the_previous_turn(cluster: LocalCluster) -> None:
    what = ReplayBench(block_tokens=BLOCK_SIZE)

    run = bench_router(what, sessions_of("d", "e"), cluster.address, connect)

    for session in ("d", "e"):
        turns = [one.sample for one in run.requests if one.session == session]
        turns.sort(key=lambda sample: sample.number)
        assert len(turns) == 4
        assert all(turn.ended_s <= later.sent_s for turn, later in pairwise(turns))


@pytest.mark.parametrize(
    ("num_own_tokens", "num_blocks"),
    [
        (100, 3),  # three tokens of the prompt and 13 of the answer, in each turn but the first
        (0, 0),  # 16 tokens of the answer, but the KV of the last one was not computed
    ],
)
def test_turns_that_continue_answers_have_more_blocks_in_common(
    cluster: LocalCluster, num_own_tokens: int, num_blocks: int
) -> None:
    recorded, continued = (
        replayed(
            sessions_of(f"{name}{num_own_tokens}/", num_own_tokens=num_own_tokens),
            cluster.address,
            use_answers=use_answers,
        )
        for name, use_answers in (("f", False), ("g", True))
    )

    num_more = (continued.ideal_reuse - recorded.ideal_reuse) * continued.num_prompt_tokens
    assert num_more == pytest.approx(num_blocks * BLOCK_SIZE, abs=1e-6)
    num_fewer = recorded.num_distinct_tokens - continued.num_distinct_tokens
    assert num_fewer == num_blocks * BLOCK_SIZE


def test_ctrl_c_keeps_the_completed_requests(cluster: LocalCluster) -> None:
    what = ReplayBench(block_tokens=BLOCK_SIZE)

    def interrupt(_name: str, num_ended: int, _num_planned: int) -> None:
        if num_ended == 2:
            os.kill(os.getpid(), signal.SIGINT)

    run = bench_router(what, sessions_of("h", num_turns=7), cluster.address, connect, interrupt)

    assert run.is_cut_short
    assert 2 <= len(run.requests) < 7


def test_the_command_prints_tables_and_writes_figures(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    lines = [
        {
            "timestamp": 10 * n,
            "input_length": 1600,
            "output_length": 64,
            "hash_ids": [0, 1, 2, n + 3],
        }
        for n in range(4)
    ]
    lines.append({"timestamp": 99, "input_length": 512 * 40, "output_length": 64, "hash_ids": []})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    figures = tmp_path / "figures.json"
    address = ("--router", cluster.address)

    done = run_benchmark(
        "replay", str(trace), *address, "--block-tokens", "16", "--json", str(figures)
    )

    assert done.returncode == 0, done.stderr
    values = json.loads(figures.read_text())
    assert values["figures"]["num_answered"] == 5
    # The last prompt has 640 tokens, and the model takes 512 with the answer of two.
    assert values["figures"]["num_cut_tokens"] == 640 - 510
    assert [row["number"] for row in values["requests"]] == [0, 1, 2, 3, 4]
    for expected in ("5 of 5", "reuse/ideal", "prompt tokens by source", "1 (130 tokens)"):
        assert expected in done.stdout
