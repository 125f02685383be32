"""A proposer that drafts a constant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from baton.core.ids import BlockId, PrefixKeys, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.batch.input_batch import PersistentBatch
from baton.engine.runner.drafting.spec_decoder import SpecDecoder
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import DraftRow, Drafts

A, B = RequestId("a"), RequestId("b")
SEVEN = 7
KEYS = PrefixKeys("salt", "adapter")


class Constant:
    """Proposer of sevens."""

    def __init__(self) -> None:
        self.forgotten: list[DraftRow] = []

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        return {row.request_id: [SEVEN] * min(row.max_tokens, 2) for row in rows}

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        self.forgotten += rows.values()


def a_row(name: RequestId, block: int) -> PlanRow:
    sampling = SamplingParams(max_tokens=30)
    return PlanRow(name, (5, 6), 1, 1, ((BlockId(block),),), sampling, 0)


def test_drafts_of_a_pass_are_reported_and_fewer_follow_failures() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=64)
    batch.apply(Plan(started=(a_row(A, 0), a_row(B, 1))))
    proposer = Constant()
    spec_decoder = SpecDecoder(batch, Speculation(num_tokens=4), proposer)
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
    speculation = Speculation(num_tokens=4, is_adaptive=False)
    spec_decoder = SpecDecoder(batch, speculation, Constant())
    step = batch.step({A: 1}, spec_decoder.drafts({A: 1}, 8))

    for _ in range(9):
        spec_decoder.note_results(step, RunResult(token_ids={A: [1]}), took_s=None)

    assert spec_decoder.drafts({A: 1}, 8) == {A: [SEVEN, SEVEN]}


def test_a_proposer_gets_the_last_tokens_of_rows_that_end() -> None:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=64, block_size=64)
    batch.apply(Plan(started=(replace(a_row(A, 0), prefix_keys=KEYS),)))
    batch.append(A, [SEVEN, 8])
    proposer = Constant()

    SpecDecoder(batch, Speculation(num_tokens=4), proposer).forget([A, B])

    [ended] = proposer.forgotten
    assert ended.known_tokens.tolist() == [5, 6, SEVEN, 8]
    assert ended.num_prompt_tokens == 1
    assert ended.prefix_keys == KEYS
