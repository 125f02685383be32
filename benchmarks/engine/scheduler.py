"""Scheduler benchmark: µs per running request for one schedule and one update.

There is no model: every request gets the same token at once. The measurement is the steady state
of decoding, in which no request ends and blocks are added as they fill up. Times are CPU time of
the thread, which other load distorts less than wall time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import thread_time

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_WARM_UP_STEPS = 32
NUM_STEPS = 320


@dataclass(frozen=True, slots=True)
class SchedulerStepCost:
    """Medians over the steps of one setting."""

    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    schedule_us: float  # per step
    update_us: float  # per step
    us_per_request: float  # both, divided by num_running
    p99_us_per_request: float


def run(
    num_running: Sequence[int] = (256, 1024),
    num_waiting: int = 10_000,
    context_lengths: Sequence[int] = (128, 8192),
    *,
    kv_events: bool = False,
) -> dict[str, list[dict[str, float]]]:
    """Return step costs by batch size, with a long queue, and by context length."""
    largest = max(num_running)
    measure = partial(measure_steps, kv_events=kv_events)
    return {
        "by_num_running": [asdict(measure(count, 0, 128)) for count in num_running],
        "with_waiting_queue": [asdict(measure(largest, num_waiting, 128))],
        "by_context_length": [asdict(measure(largest, 0, tokens)) for tokens in context_lengths],
    }


def measure_steps(
    num_running: int, num_waiting: int, num_prompt_tokens: int, *, kv_events: bool
) -> SchedulerStepCost:
    """Measure steps. With `kv_events`, the changes of the prefix cache are taken after each."""
    scheduler = full_scheduler(num_running, num_waiting, num_prompt_tokens, kv_events=kv_events)
    schedule_s, update_s = [], []
    for _ in range(NUM_STEPS):
        before = thread_time()
        plan = scheduler.schedule(0.0)
        planned = thread_time()
        result = answer(plan)
        answered = thread_time()
        scheduler.update(plan, result)
        scheduler.take_kv_events()
        schedule_s.append(planned - before)
        update_s.append(thread_time() - answered)
    both = [1e6 * (a + b) / num_running for a, b in zip(schedule_s, update_s, strict=True)]
    return SchedulerStepCost(
        num_running=num_running,
        num_waiting=num_waiting,
        num_prompt_tokens=num_prompt_tokens,
        schedule_us=1e6 * statistics.median(schedule_s),
        update_us=1e6 * statistics.median(update_s),
        us_per_request=statistics.median(both),
        p99_us_per_request=statistics.quantiles(both, n=100)[98],
    )


def full_scheduler(
    num_running: int, num_waiting: int, num_prompt_tokens: int, *, kv_events: bool
) -> Scheduler:
    """Return a scheduler with `num_running` decoding and `num_waiting` queued requests."""
    num_steps = NUM_WARM_UP_STEPS + NUM_STEPS + 8
    tokens_each = num_prompt_tokens + num_steps + BLOCK_SIZE
    blocks_each = -(-tokens_each // BLOCK_SIZE)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=num_running * (num_prompt_tokens + 1),
            max_num_seqs=num_running,
            max_model_len=tokens_each + 1,
            eos_token_ids=frozenset({0}),
        ),
        CacheConfig(
            num_blocks=num_running * blocks_each,
            block_size=BLOCK_SIZE,
            collect_events=kv_events,
            collect_token_ids=kv_events,
        ),
    )
    sampling = SamplingParams(max_tokens=num_steps)
    for number in range(num_running + num_waiting):
        # Prompts of different lengths, so that blocks do not all fill up in the same step.
        prompt = (number + 1, *range(1, num_prompt_tokens - number % BLOCK_SIZE))
        scheduler.add(EngineRequest(RequestId(f"request-{number}"), prompt, sampling, seed=0))
    for _ in range(NUM_WARM_UP_STEPS):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, answer(plan))
    if scheduler.stats().num_running != num_running:
        raise RuntimeError(f"not all run: {scheduler.stats()}")
    return scheduler


def answer(plan: Plan) -> RunResult:
    """Give every request of a plan the same token."""
    return RunResult({request_id: [7] for request_id in plan.num_scheduled_tokens})
