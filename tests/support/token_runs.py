"""Runs of tokens as the sampler gets them, without a batch around them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow
from baton.engine.runner.layout import TokenRun


def make_run(
    known: Sequence[int],
    sampling: SamplingParams,
    *,
    num_prompt_tokens: int | None = None,
    seed: int = 0,
) -> TokenRun:
    """Build the run of a row whose next token follows `known`; by default all of it is prompt."""
    tokens = tuple(known)
    num_prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    row = PlanRow(RequestId("r"), tokens, num_prompt, 0, ((),), sampling, seed)
    return TokenRun(row, 0, 1, len(tokens), np.array(tokens, dtype=np.int64))
