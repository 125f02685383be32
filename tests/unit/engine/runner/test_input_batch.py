"""Rows of the runner's batch: an overflow raises an error, even of a single element."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.core.ids import BlockId, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.errors import RowOverflow
from baton.engine.plan import BlockTables, Plan, PlanRow
from baton.engine.runner.batch.input_batch import PersistentBatch
from baton.engine.runner.drafting.spec_decoder import SpecDecoder
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.suffix_proposer import SuffixProposer

MAX_MODEL_LEN = 8
R = RequestId("r")


@pytest.mark.parametrize("num_more", [1, 2])
def test_blocks_beyond_the_block_table_are_refused(num_more: int) -> None:
    """numpy would ignore a single element silently, and raise ValueError for two."""
    batch = _batch_of(num_tokens=3, block_ids=[4, 5])

    with pytest.raises(RowOverflow, match=f"r was given {2 + num_more} blocks; .* hold 2"):
        batch.apply(Plan(new_block_ids={R: _blocks(range(num_more))}))


def test_a_row_that_starts_with_too_many_blocks_is_refused() -> None:
    with pytest.raises(RowOverflow, match="3 blocks"):
        _batch_of(num_tokens=3, block_ids=[4, 5, 6])


def test_a_token_beyond_the_row_is_refused() -> None:
    batch = _batch_of(num_tokens=MAX_MODEL_LEN, block_ids=[4, 5])
    batch.append(R, [1])

    with pytest.raises(RowOverflow, match="r would have 10 tokens; rows hold 9"):
        batch.append(R, [1])


def test_a_draft_token_beyond_the_row_is_refused() -> None:
    batch = _batch_of(num_tokens=MAX_MODEL_LEN, block_ids=[4, 5])
    batch.append(R, [1])

    with pytest.raises(RowOverflow, match="r would have 10 tokens; rows hold 9"):
        batch.step({R: 1}, {R: [2]})


@pytest.mark.parametrize(("num_tokens", "draft"), [(5, []), (4, [7])])
def test_tokens_without_a_slot_are_refused(num_tokens: int, draft: list[int]) -> None:
    """Their KV would be written to a block of another request."""
    batch = _batch_of(num_tokens=5, block_ids=[4])

    with pytest.raises(RowOverflow, match="its blocks hold 4"):
        batch.step({R: num_tokens}, {R: draft})


def test_a_full_row_is_computed_to_its_end() -> None:
    batch = _batch_of(num_tokens=MAX_MODEL_LEN, block_ids=[4, 5])

    step = batch.step({R: MAX_MODEL_LEN})

    assert step.layout.write_blocks.tolist() == [[4] * 4 + [5] * 4]


@pytest.mark.parametrize("max_draft_tokens", [0, 2])
def test_drafts_are_limited_by_the_remaining_step_budget(max_draft_tokens: int) -> None:
    batch = PersistentBatch(max_num_seqs=1, max_model_len=64, block_size=64)
    row = PlanRow(R, (5, 6) * 8, 1, 15, _blocks([0]), SamplingParams(max_tokens=60), 0)
    batch.apply(Plan(started=(row,)))
    speculation = Speculation(num_tokens=4)
    spec_decoder = SpecDecoder(batch, speculation, SuffixProposer(speculation), 1000)

    drafts = spec_decoder.drafts({R: 1}, max_draft_tokens)

    assert [len(draft) for draft in drafts.values()] == [max_draft_tokens] * bool(max_draft_tokens)


def _batch_of(*, num_tokens: int, block_ids: Sequence[int]) -> PersistentBatch:
    batch = PersistentBatch(max_num_seqs=2, max_model_len=MAX_MODEL_LEN, block_size=4)
    tokens = tuple(range(num_tokens))
    row = PlanRow(R, tokens, num_tokens, 0, _blocks(block_ids), SamplingParams(max_tokens=99), 0)
    batch.apply(Plan(started=(row,)))
    return batch


def _blocks(block_ids: Sequence[int]) -> BlockTables:
    return (tuple(BlockId(block) for block in block_ids),)
