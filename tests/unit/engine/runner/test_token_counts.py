"""Counts of a row's tokens: those of the whole history, without reading it in each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import BlockId, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan, PlanRow
from baton.engine.runner.batch.input_batch import PersistentBatch
from baton.engine.runner.device.step_inputs import SHARED_INPUTS
from baton.engine.runner.model.token_counts import TokenCounts
from baton.engine.runner.sampling.constraints import Constraints
from baton.engine.runner.sampling.sampling import SampledRows

R = RequestId("r")
TOKENS = st.lists(st.integers(0, 5), max_size=5)
# What a step with drafts adds: those that it accepts, those that it rejects, and its own token.
STEPS = st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 5)), max_size=12)


def test_a_step_with_penalties_does_not_read_the_history_again() -> None:
    batch = PersistentBatch(max_num_seqs=1, max_model_len=64, block_size=64)
    sampling = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, max_tokens=9)
    row = PlanRow(R, (1, 2, 2, 3), 3, 0, ((BlockId(0),),), sampling, 0)
    batch.apply(Plan(started=(row,)))
    _constrained_logits(batch, 4)
    [run] = batch.step({R: 4}).runs
    batch.advance(batch.step({R: 4}))
    batch.append(R, [4])
    run.tokens[:3] = 7  # so that reading them again would count them

    logits = _constrained_logits(batch, 1)

    assert logits.tolist() == [1.0, 0.5, 0.5, 0.0, 0.0, 1.0, 1.0, 1.0]


@given(TOKENS, STEPS)
def test_counts_are_those_of_the_whole_history_whatever_drafts_are_rejected(
    prompt: list[int], steps: list[tuple[list[int], list[int], int]]
) -> None:
    counts, outputs = TokenCounts(len(prompt)), list[int]()
    for accepted, rejected, token in steps:
        drafts = [*accepted, *rejected]
        for num_drafts in range(len(drafts) + 1):
            known = [*outputs, *drafts[:num_drafts]]
            assert _counted(counts, prompt, known) == _expected(prompt, known)
        if rejected and token == rejected[0]:
            token += 6  # or the draft would have been accepted
        outputs += [*accepted, token]
    assert _counted(counts, prompt, outputs) == _expected(prompt, outputs)


def _constrained_logits(batch: PersistentBatch, num_tokens: int) -> torch.Tensor:
    runs = batch.step({R: num_tokens}).runs
    rows = SampledRows(runs, (), 8, torch.device("cpu"))
    return Constraints(rows, SHARED_INPUTS).apply(torch.ones(1, 8))[0]


def _counted(
    counts: TokenCounts, prompt: Sequence[int], outputs: Sequence[int]
) -> tuple[set[int], Counter[int]]:
    token_ids, numbers = counts.count(np.array([*prompt, *outputs], dtype=np.int64))
    assert len(set(token_ids.tolist())) == len(token_ids)
    found = Counter(dict(zip(token_ids.tolist(), numbers.tolist(), strict=True)))
    return set(token_ids.tolist()), +found


def _expected(prompt: Sequence[int], outputs: Sequence[int]) -> tuple[set[int], Counter[int]]:
    return {*prompt, *outputs}, Counter(outputs)
