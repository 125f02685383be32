"""First steps of a runner at start, so that no request waits for compilers and libraries."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from baton.core.errors import InvalidConfig
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.plan import BlockTables, Plan, PlanRow, Runner
from baton.engine.runner.device.memory_profile import largest_plans, num_blocks_of

log = logging.getLogger(__name__)

MAX_TOKENS = 20  # of the prompts: tiles of products are larger for more than 16
SAMPLING = (
    SamplingParams(
        temperature=0.7,
        top_k=10,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 1.0},
        banned_token_ids=(1,),
        logprobs=1,
    ),
    SamplingParams(temperature=0.0),
)


def warm_up(
    runner: Runner,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    layout: CacheLayout,
) -> None:
    """Compute a prompt and a token of requests with sampling of each kind.

    The requests share blocks of the runner. Nothing is computed if it has too few of them, or if
    it computes single tokens only.
    """
    num_rows = min(len(SAMPLING), max_num_seqs)
    num_tokens = min(MAX_TOKENS, num_rows * (max_model_len - 1))
    if num_tokens < num_rows:
        return
    _, plan = largest_plans(num_tokens, num_rows, max_model_len, block_size, layout)
    if num_blocks_of(plan) > num_blocks:
        return
    began_s = time.monotonic()
    rows = [
        replace(row, sampling=sampling, block_tables=_with_room(row, block_size))
        for row, sampling in zip(plan.started, SAMPLING, strict=False)
    ]
    decodes = dict.fromkeys(plan.num_scheduled_tokens, 1)
    try:
        runner.launch(replace(plan, started=tuple(rows))).collect()
        runner.launch(Plan(num_scheduled_tokens=decodes)).collect()
        runner.launch(Plan(dropped=tuple(decodes))).collect()
    except torch.OutOfMemoryError as error:
        raise InvalidConfig(
            f"no memory for the first steps: lower --kv-cache-memory: {error}"
        ) from error
    log.info("first steps took %.1f s", time.monotonic() - began_s)


def _with_room(row: PlanRow, block_size: int) -> BlockTables:
    """Return tables that have a slot for a token behind the prompt, in any block."""
    num_added = 0 if row.num_prompt_tokens % block_size else 1
    return tuple((*table, *table[:num_added]) for table in row.block_tables)
