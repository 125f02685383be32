"""What a model's step costs at least."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.limits import Work, work_of

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def test_few_tokens_wait_for_memory_and_many_for_arithmetic() -> None:
    work = Work(layer_numbers=100, head_numbers=50, bytes_of_number=2)

    assert work.seconds(1, 1, bytes_per_s=300, flops_per_s=600) == 1.0
    assert work.seconds(8, 1, bytes_per_s=300, flops_per_s=600) == pytest.approx(1700 / 600)


def test_whole_numbers_are_read_faster() -> None:
    whole, small = work_of(DEMO, "none"), work_of(DEMO, "int8")

    assert small.seconds(1, 1, 1e9, 1e12) == whole.seconds(1, 1, 1e9, 1e12) / 2


def test_the_demo_model_is_counted_as_its_files_hold_it() -> None:
    work = work_of(DEMO, "none")

    stored = (DEMO / "model.safetensors").stat().st_size
    assert work.layer_numbers * 2 + work.head_numbers * 2 == pytest.approx(stored, rel=0.01)
