"""Benchmark `forms`: figures for every constraint, and every random walk obeys it."""

from __future__ import annotations

from benchmarks.engine.structured_output import FORMS, FormBench, run


def test_every_constraint_is_compiled_and_followed() -> None:
    done: list[str] = []

    costs, applied = run(FormBench("models/demo", 1, 6, (1, 3)), done.append)

    assert done == [cost.form for cost in costs] == list(FORMS)
    for cost in costs:
        assert cost.compile_ms > 0
        assert 2 <= cost.num_tokens <= 6
        assert 0 < cost.mask_p50_us <= cost.mask_p99_us <= cost.mask_max_us
    assert [cost.num_rows for cost in applied] == [1, 3]
    assert all(cost.us_per_step > 0 for cost in applied)
