"""Runs of tokens as the sampler gets them, without a batch around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.sampling.sampler import Sampler, Samples
from baton.engine.structured_output.grammar import num_words


def allow_only(run: TokenRun, token_ids: Collection[int], vocab_size: int) -> TokenRun:
    """Return the run with a grammar mask that allows these tokens."""
    flags = np.isin(np.arange(num_words(vocab_size) * 32), list(token_ids))
    return run._replace(allowed=np.packbits(flags, bitorder="little").view(np.int32))


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


def sample(
    sampler: Sampler,
    logits: Tensor,
    runs: Sequence[TokenRun],
    inputs: StepInputs = SHARED_INPUTS,
) -> Samples:
    """Sample rows of logits in a step of their own."""
    inputs.begin()
    step = sampler.begin(runs, logits.shape[1], inputs)
    inputs.send()
    return sampler.read(sampler.launch(step, logits))
