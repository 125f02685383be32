"""A proposer that drafts a constant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from baton.core.ids import BlockId, PrefixKeys, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.batch.input_batch import PersistentBatch
from baton.engine.runner.drafting.spec_decoder import MAX_FAILURES_IN_A_ROW, SpecDecoder
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import DraftRow, Drafts

A, B = RequestId("a"), RequestId("b")
SEVEN = 7
VOCAB_SIZE = 10
FIXED = Speculation(num_tokens=4, is_adaptive=False)
KEYS = PrefixKeys("salt", "adapter")


class Constant:
    """Proposer of sevens."""

    def __init__(self) -> None:
        self.forgotten: list[DraftRow] = []

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        return {row.request_id: [SEVEN] * min(row.max_tokens, 2) for row in rows}

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        self.forgotten += rows.values()


class Given:
    """Proposer of given drafts, which raises if there are none."""

    def __init__(self) -> None:
        self.drafts: Drafts | None = None
        self.forgotten: list[RequestId] = []

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        if self.drafts is None:
            raise ZeroDivisionError("no drafts")
        return self.drafts

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        self.forgotten += rows
        raise ZeroDivisionError("nothing to forget")


def a_row(name: RequestId, block: int) -> PlanRow:
    sampling = SamplingParams(max_tokens=30)
    return PlanRow(name, (5, 6), 1, 1, ((BlockId(block),),), sampling, 0)


def test_drafts_of_a_pass_are_reported_and_fewer_follow_failures() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=64)
    batch.apply(Plan(started=(a_row(A, 0), a_row(B, 1))))
    proposer = Constant()
    spec_decoder = SpecDecoder(batch, Speculation(num_tokens=4), proposer, VOCAB_SIZE)
    drafts = spec_decoder.drafts({A: 1, B: 1}, 8)
    step = batch.step({A: 1, B: 1}, drafts)

    result = RunResult(token_ids={A: [SEVEN, 1], B: [2]})
    spec_decoder.note_results(step, result, took_s=None)

    assert drafts == {A: [SEVEN, SEVEN], B: [SEVEN, SEVEN]}
    assert result.num_proposed == {A: 2, B: 2}
    failed = RunResult(token_ids={A: [1], B: [2]})
    for _ in range(9):
        spec_decoder.note_results(step, failed, took_s=None)
    assert not spec_decoder.drafts({A: 1, B: 1}, 8)


def test_without_adaptation_drafts_are_as_long_after_failures() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=64)
    batch.apply(Plan(started=(a_row(A, 0),)))
    spec_decoder = SpecDecoder(batch, FIXED, Constant(), VOCAB_SIZE)
    step = batch.step({A: 1}, spec_decoder.drafts({A: 1}, 8))

    for _ in range(9):
        spec_decoder.note_results(step, RunResult(token_ids={A: [1]}), took_s=None)

    assert spec_decoder.drafts({A: 1}, 8) == {A: [SEVEN, SEVEN]}


def test_a_proposer_gets_the_last_tokens_of_rows_that_end() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=64)
    batch.apply(Plan(started=(replace(a_row(A, 0), prefix_keys=KEYS),)))
    batch.append(A, [SEVEN, 8])
    proposer = Constant()

    SpecDecoder(batch, Speculation(num_tokens=4), proposer, VOCAB_SIZE).forget([A, B])

    [ended] = proposer.forgotten
    assert ended.known_tokens.tolist() == [5, 6, SEVEN, 8]
    assert ended.num_prompt_tokens == 1
    assert ended.prefix_keys == KEYS


def test_drafts_of_no_use_are_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=64)
    batch.apply(Plan(started=(a_row(A, 0), a_row(B, 1))))
    proposer = Given()
    spec_decoder = SpecDecoder(batch, FIXED, proposer, VOCAB_SIZE)
    beyond = {A: [1, 2, VOCAB_SIZE, 3], B: [-1], RequestId("c"): [1]}

    proposer.drafts = beyond
    assert spec_decoder.drafts({A: 1, B: 1}, 8) == {A: [1, 2]}
    proposer.drafts = {A: [1] * 9, B: [2] * 9}
    assert spec_decoder.drafts({A: 1, B: 1}, 7) == {A: [1] * 4, B: [2] * 3}
    proposer.drafts = {A: [], B: [2]}
    assert spec_decoder.drafts({A: 1, B: 1}, 8) == {B: [2]}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "proposer of 'ngram'" in caplog.text


def test_a_proposer_that_keeps_failing_is_not_asked_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=64)
    plan = Plan(started=(a_row(A, 0),), num_scheduled_tokens={A: 1}, max_draft_tokens=8)
    batch.apply(plan)
    proposer = Given()
    spec_decoder = SpecDecoder(batch, FIXED, proposer, VOCAB_SIZE)
    for _ in range(MAX_FAILURES_IN_A_ROW - 1):
        assert not spec_decoder.drafts({A: 1}, 8)
    proposer.drafts = {A: [SEVEN]}
    assert spec_decoder.drafts({A: 1}, 8) == {A: [SEVEN]}
    assert spec_decoder.can_draft(plan)

    proposer.drafts = None
    for _ in range(MAX_FAILURES_IN_A_ROW):
        assert not spec_decoder.drafts({A: 1}, 8)

    proposer.drafts = {A: [SEVEN]}
    assert not spec_decoder.drafts({A: 1}, 8)
    assert not spec_decoder.can_draft(plan)
    spec_decoder.forget([A])
    assert proposer.forgotten == [A]  # what it keeps of a request is freed
    assert caplog.text.count("the proposer of 'ngram' fails") == 2 * MAX_FAILURES_IN_A_ROW - 1
    assert caplog.text.count("drafts no more") == 1
