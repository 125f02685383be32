"""Memory that the largest steps and graphs take, measured before the KV cache gets what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockId, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.plan import Plan, PlanRow, Runner, StateBlocks
from baton.engine.runner.device.device import Device, MemoryProfile

SAMPLING = SamplingParams(temperature=1.0, top_p=0.9)  # takes more memory than greedy


def profile_steps(
    device: Device, plans: Sequence[Plan], use_runner: Callable[[Callable[[Runner], None]], None]
) -> MemoryProfile | None:
    """Run plans and return the memory that they take; None on a CPU, where nothing is run.

    `use_runner` calls a function with a runner that has room for the tokens of each plan.
    """

    def run(runner: Runner) -> None:
        for plan in plans:
            runner.launch(plan).collect()
            runner.launch(Plan(dropped=tuple(plan.num_scheduled_tokens))).collect()

    try:
        return device.profile(lambda: use_runner(run))
    except torch.OutOfMemoryError as error:
        plan = plans[0]
        raise InvalidConfig(
            f"no memory for a step of {plan.num_prompt_tokens} tokens and {len(plan.started)} "
            f"requests: lower --max-num-batched-tokens or --max-num-seqs: {error}"
        ) from error


def largest_plans(
    num_tokens: int, num_seqs: int, max_model_len: int, block_size: int, layout: CacheLayout
) -> list[Plan]:
    """Return plans with as many tokens and rows as possible. Their rows share their blocks.

    All rows are sampled. One plan has prompts as long as possible, the other one equal ones.
    """
    longest = prompt_lengths(num_tokens, num_seqs, max_model_len - 1)
    equal = [min(num_tokens // len(longest), max_model_len - 1)] * len(longest)
    return [_plan(lengths, block_size, layout) for lengths in (longest, equal)]


def _plan(lengths: Sequence[int], block_size: int, layout: CacheLayout) -> Plan:
    num_places = -(-lengths[0] // block_size)
    num_groups, size = len(layout.groups), layout.num_state_blocks
    num_sides = layout.num_state_sides if layout.has_state else 0
    blocks = tuple(map(BlockId, range(num_places * num_groups + num_sides * size)))
    tables = tuple(
        blocks[group * num_places : (group + 1) * num_places] for group in range(num_groups)
    )
    state, sides = None, blocks[num_places * num_groups :]
    if layout.has_state:
        state = StateBlocks(tuple(sides[at : at + size] for at in range(0, len(sides), size)))
    rows = [
        PlanRow(
            RequestId(f"profile-{number}"),
            token_ids=(0,) * length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_tables=tuple(table[: -(-length // block_size)] for table in tables),
            sampling=SAMPLING,
            seed=number,
            state=state,
        )
        for number, length in enumerate(lengths)
    ]
    return Plan(
        started=tuple(rows),
        num_scheduled_tokens={row.request_id: row.num_prompt_tokens for row in rows},
        num_prompt_tokens=sum(lengths),
    )


def prompt_lengths(num_tokens: int, num_seqs: int, max_len: int) -> list[int]:
    """Divide tokens among prompts, the longest first, so that each has at least one."""
    lengths: list[int] = []
    for num_others in reversed(range(min(num_seqs, num_tokens))):
        lengths.append(min(max_len, num_tokens - sum(lengths) - num_others))
    return lengths


def num_blocks_of(plan: Plan) -> int:
    """Return the number of blocks that a plan uses whose rows share their blocks."""
    first = plan.started[0]
    sides = () if first.state is None else first.state.sides
    return sum(map(len, (*first.block_tables, *sides)))
