"""Replay: prompts of recorded blocks, the ideal reuse, and figures of handmade runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client import Sample
from baton.bench.load import Slo
from baton.client import Finish, Served
from baton.core.errors import InvalidConfig
from baton.core.output import FinishReason
from benchmarks.replay.figures import request_rows, summarise
from benchmarks.replay.plots import draw
from benchmarks.replay.prefix_tree import PrefixTree
from benchmarks.replay.run import ReplayedRequest, ReplayRun
from benchmarks.replay.sources import lost_by_reason, num_reused, tokens_by_source
from benchmarks.replay.trace import TraceRequest
from benchmarks.replay.workload import PromptBuilder, ReplayPrompt, Scaling, Turn

VOCAB_SIZE = 500
SMALL_BLOCKS = Scaling(recorded_block_tokens=512, block_tokens=16)


def a_prompt(
    *names: str, num_tokens: int | None = None, number: int = 0, **scaling: int | None
) -> ReplayPrompt:
    request = TraceRequest(0.0, num_tokens or 512 * len(names), 64, names)
    sizes = Scaling(512, 16, **scaling)
    return PromptBuilder(sizes, VOCAB_SIZE).build(number, request)


# --- prompts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "scaled"), [(0, 1), (31, 1), (511, 15), (512, 16), (513, 16), (1600, 50)]
)
def test_prompt_lengths_scale_with_the_block_size(recorded: int, scaled: int) -> None:
    assert SMALL_BLOCKS.num_tokens(recorded) == scaled


def test_prompt_lengths_are_as_recorded_with_the_recorded_block_size() -> None:
    assert [Scaling(64, 64).num_tokens(count) for count in (1, 63, 64, 1000)] == [1, 63, 64, 1000]


def test_equal_blocks_have_equal_tokens_and_different_blocks_have_different_tokens() -> None:
    first = a_prompt("a", "b").token_ids
    second = a_prompt("a", "c", number=1).token_ids

    assert len(first) == len(second) == 32
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]


def test_the_part_after_the_last_whole_block_differs_between_requests() -> None:
    first = a_prompt("a", num_tokens=768).token_ids
    second = a_prompt("a", num_tokens=768, number=1).token_ids

    assert len(first) == 24
    assert first[:16] == second[:16]
    assert first[16:] != second[16:]


def test_prompts_depend_on_the_seed_alone() -> None:
    request = TraceRequest(0.0, 700, 64, ("a",))
    prompts = [
        PromptBuilder(SMALL_BLOCKS, VOCAB_SIZE, seed).build(0, request) for seed in (1, 1, 2)
    ]

    assert prompts[0] == prompts[1]
    assert prompts[0].token_ids[:16] != prompts[2].token_ids[:16]


def test_answers_are_scaled_and_limited() -> None:
    assert a_prompt("a").num_output_tokens == 2
    assert a_prompt("a", max_output_tokens=1).num_output_tokens == 1


def test_a_prompt_beyond_the_context_keeps_its_beginning_and_reports_the_cut_tokens() -> None:
    whole, cut = a_prompt("a", "b"), a_prompt("a", "b", max_sequence_len=20)

    assert cut.token_ids == whole.token_ids[:18]  # and two tokens of the answer
    assert (whole.num_cut_tokens, cut.num_cut_tokens) == (0, 14)


def test_sizes_below_one_are_rejected() -> None:
    for sizes in ({"block_tokens": 0}, {"block_tokens": 16, "max_output_tokens": 0}):
        with pytest.raises(InvalidConfig, match="at least 1"):
            Scaling(512, **sizes)


# --- turns that continue answers --------------------------------------------------------


def next_turn(*names: str, num_tokens: int, answer: tuple[int, ...] = (7, 8, 9)) -> list[int]:
    """Return the prompt after a turn of the blocks a and b, with 8 tokens of its own."""
    builder = PromptBuilder(SMALL_BLOCKS, VOCAB_SIZE)
    first = TraceRequest(0.0, 512 * 2 + 256, 64, ("a", "b"))
    turn = Turn(first, builder.build(0, first).token_ids, answer)
    second = TraceRequest(1.0, num_tokens, 64, names)
    return list(builder.build(1, second, turn).token_ids)


def test_a_turn_continues_the_prompt_and_the_answer_of_the_previous_turn() -> None:
    first = a_prompt("a", "b", num_tokens=512 * 2 + 256).token_ids
    recorded = a_prompt("a", "b", "c", "d").token_ids

    prompt = next_turn("a", "b", "c", "d", num_tokens=2048)

    assert prompt == [*first, 7, 8, 9, *recorded[len(first) + 3 :]]


def test_a_turn_is_as_long_as_recorded_even_if_the_answer_does_not_fit() -> None:
    prompt = next_turn("a", "b", num_tokens=512 * 2 + 320)

    assert len(prompt) == 42
    assert prompt[40:] == [7, 8]


def test_an_edited_conversation_has_only_its_leading_blocks_in_common() -> None:
    assert next_turn("a", "x", num_tokens=1024) == list(a_prompt("a", "x").token_ids)


# --- ideal reuse ------------------------------------------------------------------------

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=12)


@given(SEQUENCES, st.integers(1, 4))
def test_the_ideal_reuse_is_the_longest_seen_prefix_in_whole_blocks(
    sequences: list[list[int]], block_size: int
) -> None:
    tree = PrefixTree(block_size)
    for number, sequence in enumerate(sequences):
        assert len(tree.find(sequence)) == longest_seen(sequences[:number], sequence, block_size)
        tree.add(sequence)
    assert tree.num_blocks == len(
        {
            tuple(one[:end])
            for one in sequences
            for end in range(block_size, len(one) + 1, block_size)
        }
    )


def longest_seen(before: list[list[int]], sequence: list[int], block_size: int) -> int:
    """Return the number of blocks by comparing with every sequence, for each length."""
    best = 0
    for num_blocks in range(1, (len(sequence) - 1) // block_size + 1):
        end = num_blocks * block_size
        if any(len(one) >= end and one[:end] == sequence[:end] for one in before):
            best = num_blocks
    return best


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    tree = PrefixTree(4)
    tree.add([1, 2, 3, 4])

    assert len(tree.find([1, 2, 3, 4])) == 0
    assert len(tree.find([1, 2, 3, 4, 5])) == 1


def test_each_block_lists_all_nodes_that_computed_it() -> None:
    tree = PrefixTree(2)
    tree.add([1, 2, 3, 4])
    tree.add([1, 2, 3, 4], frozenset({"p0", "d0"}))
    tree.add([1, 2], frozenset({"p1"}))
    tree.add([1, 2, 9, 9])

    assert tree.find([1, 2, 3, 4, 5]) == [{"p0", "p1", "d0"}, {"p0", "d0"}]
    assert tree.find([1, 2, 9, 9, 9]) == [{"p0", "p1", "d0"}, frozenset()]


# --- sources ----------------------------------------------------------------------------


def a_finish(
    *,
    cached: int | None = 0,
    loaded: Mapping[str, int] | None = None,
    is_remote: bool = True,
    num_prompt_tokens: int = 40,
) -> Finish:
    served = Served(
        "p0", "d0", is_remote, "", 0, 0, "nixl", 0, 0, 1, prompt_tokens_loaded=loaded or {}
    )
    return Finish(
        FinishReason.LENGTH,
        num_prompt_tokens,
        2,
        *(0, 0, 0, 0),
        served,
        num_cached_prompt_tokens=cached,
    )


@pytest.mark.parametrize(
    ("finish", "sources", "reused"),
    [
        (a_finish(), {"computed on prefill": 40}, 0),
        (
            a_finish(cached=32, loaded={"host": 8, "peer": 16}),
            {"prefill KV cache": 8, "host": 8, "peer": 16, "computed on prefill": 8},
            32,
        ),
        (
            a_finish(cached=16, loaded={"file": 16}, is_remote=False),
            {"file": 16, "computed on decode": 24},
            16,
        ),
        (
            a_finish(cached=16, is_remote=False),
            {"decode KV cache": 16, "computed on decode": 24},
            16,
        ),
        (a_finish(cached=None), {"unknown": 40}, 0),
    ],
)
def test_every_prompt_token_has_one_source(
    finish: Finish, sources: dict[str, int], reused: int
) -> None:
    by_source = tokens_by_source(finish)

    assert by_source == sources
    assert sum(by_source.values()) == finish.num_prompt_tokens
    assert num_reused(by_source) == reused


def test_recomputed_tokens_are_counted_by_the_place_that_had_them() -> None:
    found = [frozenset({"p0"}), frozenset({"p0", "p1"}), frozenset({"p1"}), frozenset[str]()]

    assert lost_by_reason(a_finish(), found, 16, 16) == {
        "same node": 16,
        "other node": 16,
        "in flight": 16,
    }
    assert lost_by_reason(a_finish(is_remote=False), found[:1], 0, 16) == {"other node": 16}
    assert lost_by_reason(a_finish(), found, 64, 16) == {}


# --- figures ----------------------------------------------------------------------------


def a_request(
    number: int = 0,
    *,
    cached: int = 0,
    ideal: int = 0,
    first_s: float = 0.1,
    error: str | None = None,
    num_cut_tokens: int = 0,
) -> ReplayedRequest:
    sample = Sample(number, 0.0, 0.0, first_s + 0.1, [(first_s, 1), (first_s + 0.1, 1)], a_finish())
    sample.token_ids = [1, 2]
    by_source = tokens_by_source(a_finish(cached=cached))
    request = ReplayedRequest("", sample, 40, num_cut_tokens, ideal, by_source, {})
    if error is not None:
        request.sample = Sample(number, 0.0, error=error)
        request.by_source = {}
    return request


def a_run(*requests: ReplayedRequest) -> ReplayRun:
    return ReplayRun(len(requests), list(requests), 4.0, 128)


def test_reuse_is_the_share_of_prompt_tokens_that_were_not_computed() -> None:
    run = a_run(
        a_request(0),
        a_request(1, cached=16, ideal=32),
        a_request(2, ideal=32, error="QUEUE_FULL"),  # not answered: no part of the shares
    )

    figures = summarise(run, Slo())

    assert (figures.num_answered, figures.errors) == (2, {"QUEUE_FULL": 1})
    assert figures.reuse == pytest.approx(16 / 80)
    assert figures.ideal_reuse == pytest.approx(32 / 80)
    assert figures.reuse_of_ideal == pytest.approx(0.5)
    assert figures.tokens_by_source == {"computed on prefill": 64, "prefill KV cache": 16}
    assert sum(figures.tokens_by_source.values()) == figures.num_prompt_tokens == 80


def test_a_trace_without_reusable_tokens_has_no_reuse_ratio() -> None:
    assert summarise(a_run(a_request()), Slo()).reuse_of_ideal is None
    assert summarise(a_run(), Slo()).reuse_of_ideal is None


def test_goodput_counts_answers_that_meet_both_objectives() -> None:
    run = a_run(a_request(0), a_request(1, first_s=1.9), a_request(2, error="X"))

    figures = summarise(run, Slo(ttft=0.5, itl=0.2))

    assert figures.good_requests_per_s == pytest.approx(1 / 2.0)  # the last one ended at 2 s
    assert figures.good_tokens_per_s == pytest.approx(2 / 2.0)
    assert summarise(run, Slo(ttft=0.5, itl=0.05)).good_requests_per_s == 0


def test_truncated_prompts_are_reported() -> None:
    figures = summarise(a_run(a_request(), a_request(1, num_cut_tokens=9)), Slo())

    assert (figures.num_truncated, figures.num_cut_tokens) == (1, 9)


def test_requests_are_written_in_the_order_of_the_trace_with_their_sources() -> None:
    rows = request_rows(a_run(a_request(1, cached=16), a_request(0, error="X")))

    assert [row["number"] for row in rows] == [0, 1]
    assert [row["error"] for row in rows] == ["X", None]
    assert rows[1]["by_source"] == {"prefill KV cache": 16, "computed on prefill": 24}


def test_a_run_with_answers_is_plotted_and_a_run_without_answers_is_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "replay.png"

    assert not draw(a_run(a_request(error="X")), path)
    assert draw(a_run(*(a_request(number, cached=16, ideal=32) for number in range(50))), path)
    assert path.read_bytes().startswith(b"\x89PNG")
