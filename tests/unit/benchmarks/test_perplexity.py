"""Perplexity benchmark: windows, scored tokens and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from baton.core.errors import InvalidConfig
from baton.core.output import TokenLogprobs
from benchmarks.quality.perplexity import (
    PerplexityBench,
    Variant,
    cut_windows,
    negative_log_likelihood,
    parse_variants,
    run,
    with_importance,
)

TEXT = "def add(first, second):\n    return first + second\n" * 3


def logprobs(values: Sequence[float]) -> list[TokenLogprobs | None]:
    return [None, *(TokenLogprobs(7, value, 1) for value in values)]


def test_windows_do_not_overlap_and_each_begins_with_bos() -> None:
    assert cut_windows(range(10, 21), [1], 4) == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17, 18]]
    assert cut_windows(range(8), [], 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut_windows(range(3), [], 4) == []


def test_the_second_half_of_a_window_is_scored() -> None:
    assert negative_log_likelihood(logprobs([-9.0, -0.5, -0.25])) == 0.75
    assert negative_log_likelihood(logprobs([-9.0, -0.5, -0.25, -1.0])) == 1.75


def test_variants_are_parsed_and_named_as_they_are_written() -> None:
    written = "float32,bfloat16/int4, bfloat16/none/int8,bfloat16/int4/auto/int8"

    variants = parse_variants(written)

    assert variants == [
        Variant("float32"),
        Variant("bfloat16", "int4"),
        Variant("bfloat16", "none", "int8"),
        Variant("bfloat16", "int4", "auto", "int8"),
    ]
    assert [variant.name for variant in variants] == [
        "float32",
        *written.split(",")[1:2],
        "bfloat16/none/int8",
        "bfloat16/int4/auto/int8",
    ]
    assert Variant("bfloat16", "none", "auto").name == "bfloat16"
    for wrong in ("", "bfloat16/", "a/b/c/d/e"):
        with pytest.raises(InvalidConfig, match="is not a variant"):
            parse_variants(wrong)


@pytest.mark.parametrize(
    "wrong", ["bfloat17", "bfloat16/int3", "bfloat16/none/int4", "bfloat16/int4/auto/int4"]
)
def test_a_variant_with_an_unknown_name_is_refused_before_a_model_is_loaded(wrong: str) -> None:
    with pytest.raises(InvalidConfig, match=f"'{wrong.rpartition('/')[2]}'"):
        parse_variants(f"float32,{wrong}")


def test_importance_adds_the_variants_in_int4_again() -> None:
    variants = with_importance(parse_variants("bfloat16,bfloat16/int8,bfloat16/int4"), "file")

    assert variants[3:] == [Variant("bfloat16", "int4", quantize_importance="file")]
    assert variants[3].name == "bfloat16/int4 with importance"


def test_the_perplexity_of_the_demo_model_is_that_of_its_prompt_logprobs() -> None:
    bench = PerplexityBench(
        "models/demo", TEXT, parse_variants("float32,float32/int4"), window=16, max_windows=2
    )
    reported: list[str] = []

    exact, rounded = run(bench, lambda score: reported.append(score.variant))

    with LLM("models/demo", dtype="float32", kv_cache_memory="8MiB", show_progress=False) as llm:
        windows = cut_windows(
            llm.tokenizer.encode(TEXT, add_special_tokens=False), llm.tokenizer.encode(""), 16
        )[:2]
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scored = [
            each.logprob
            for completion in llm.generate(windows, sampling)
            for each in completion.prompt_logprobs[8:]
            if each is not None
        ]
    assert math.isclose(exact.perplexity, math.exp(-sum(scored) / 16), rel_tol=1e-6)
    assert (exact.variant, exact.loss, exact.num_tokens) == ("float32", 0.0, 16)
    assert math.isclose(rounded.loss, rounded.perplexity / exact.perplexity - 1)
    assert rounded.perplexity != exact.perplexity
    assert reported == ["float32", "float32/int4"]


def test_a_text_shorter_than_a_window_is_refused() -> None:
    bench = PerplexityBench("models/demo", "one", parse_variants("float32"))

    with pytest.raises(InvalidConfig, match="less than --window"):
        run(bench, lambda _: None)


def test_a_model_that_llamacpp_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho cannot load >&2\nexit 1\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    bench = PerplexityBench("models/demo", TEXT, [], window=16, llamacpp_venv=tmp_path)

    with pytest.raises(InvalidConfig, match=r"llama\.cpp cannot score .*demo: cannot load"):
        run(bench, lambda _: None)
