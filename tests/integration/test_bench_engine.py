"""`python -m benchmarks engine` on the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.step_cost import Spent, step_cost
from benchmarks.engine.throughput import EngineBench, Rate, run

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "demo")


def test_each_batch_size_has_its_rate_and_its_steps() -> None:
    reported: list[Rate] = []
    bench = EngineBench(
        MODEL, prompt_lens=(20,), batch_sizes=(1, 4), num_decode_steps=3, num_runs=2
    )

    found = run(bench, reported.append)

    assert [(rate.phase, rate.size) for rate in found.rates] == [
        ("prefill", 20),
        ("decode", 1),
        ("decode", 4),
    ]
    assert found.rates == reported
    assert [cost.batch for cost in found.steps] == [1, 4]
    for cost in found.steps:
        parts = (cost.scheduling_ms, cost.preparing_ms, cost.sampling_ms, cost.forward_ms)
        assert min(parts) > 0


def test_the_overhead_of_a_step_excludes_forward_pass_and_sampling() -> None:
    steps = [Spent(0.001 * place, 0.002, 0.003, 0.004) for place in (1, 2, 9)]

    cost = step_cost("auto", "none", "auto", 32, steps)

    assert cost.overhead_ms == pytest.approx(4)
    assert cost.scheduling_ms == pytest.approx(2)
    assert cost.forward_ms == pytest.approx(4)
