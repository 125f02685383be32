"""Roofline model: lower bounds on the duration of a model's step."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.engine.roofline import Work, batch_of, prompt_of, work_of

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"


WORK = Work(layer_numbers=100, head_numbers=50, bytes_of_number=2, slot_numbers=10, pair_products=5)


def test_few_tokens_wait_for_memory_and_many_for_arithmetic() -> None:
    assert WORK.seconds(batch_of(1, 0), bytes_per_s=300, flops_per_s=600) == 1.0
    assert WORK.seconds(batch_of(8, 0), bytes_per_s=300, flops_per_s=600) == 4.0


def test_a_batch_reads_what_all_of_its_sequences_have_written() -> None:
    assert WORK.seconds(batch_of(2, 15), bytes_per_s=300, flops_per_s=1e9) == 3.0


def test_a_prompt_reads_its_slots_once_and_each_token_sees_those_up_to_its_own() -> None:
    assert WORK.seconds(prompt_of(3), bytes_per_s=36, flops_per_s=1e9) == 10.0
    assert WORK.seconds(prompt_of(3), bytes_per_s=1e9, flops_per_s=760) == 1.0


def test_whole_numbers_are_read_faster() -> None:
    whole, small = work_of(DEMO, "none"), work_of(DEMO, "int8")

    alone = batch_of(1, 0)
    assert small.seconds(alone, 1e9, 1e12) == whole.seconds(alone, 1e9, 1e12) / 2


def test_the_demo_model_is_counted_as_its_files_hold_it() -> None:
    work = work_of(DEMO, "none")

    stored = (DEMO / "model.safetensors").stat().st_size
    assert work.layer_numbers * 2 + work.head_numbers * 2 == pytest.approx(stored, rel=0.01)
