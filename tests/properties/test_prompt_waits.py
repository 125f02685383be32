"""Bounded waits: of short prompts among long ones, and of urgent requests among lax ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import AdapterRef, RequestId
from baton.engine.core import EngineCore
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from baton.engine.scheduler.prompt_budget import LEAST_TOKENS
from baton.engine.scheduler.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner, KvTensor, SynchronousRunner
from tests.support.requests import make_engine_request

NUM_BLOCKS = 2048
LONGEST = 400
ADAPTERS = ("a", "b", "c")
STEP_S, TOKEN_S = 0.02, 0.001


@dataclass(frozen=True)
class Other:
    """A request that competes with the one whose wait is counted."""

    num_tokens: int
    priority: int
    adapter: str
    max_tokens: int
    at_step: int  # negative: it is there before


class _Runner(SynchronousRunner):
    """Runner with a clock, which each step advances."""

    def __init__(self, max_loras: int) -> None:
        self._runner = FakeRunner(KvTensor(NUM_BLOCKS, 16), vocab_size=100, max_loras=max_loras)
        self.now_s = 0.0

    def run(self, plan: Plan) -> RunResult:
        self.now_s += STEP_S + TOKEN_S * sum(plan.num_scheduled_tokens.values())
        return self._runner.run(plan)


class _Engine:
    """Engine with other requests, each of which arrives at its step."""

    def __init__(self, config: SchedulerConfig, others: Sequence[Other]) -> None:
        runner = _Runner(config.max_loras)
        self._scheduler = Scheduler(config, CacheConfig(num_blocks=NUM_BLOCKS))
        self._scheduler.adapters |= set(ADAPTERS)
        self._core = EngineCore(self._scheduler, runner, clock=lambda: runner.now_s)
        self._others = others
        self._step = min((other.at_step for other in others), default=0)
        self._num_added = 0
        while self._step < 0:
            self.step()

    def add(self, num_tokens: int, priority: int, adapter: str, max_tokens: int) -> RequestId:
        self._num_added += 1
        prompt = [self._num_added, *range(num_tokens - 1)]
        request = make_engine_request(
            [token % 100 for token in prompt],
            request_id=f"r{self._num_added}",
            max_tokens=max_tokens,
        )
        self._scheduler.add(
            replace(
                request,
                priority=priority,
                adapter=AdapterRef(adapter, adapter),
                arrival_s=float(self._num_added),
            )
        )
        return request.request_id

    def step(self) -> set[RequestId]:
        """Run a step. Returns the requests that got a token."""
        for other in self._others:
            if other.at_step == self._step:
                self.add(other.num_tokens, other.priority, other.adapter, other.max_tokens)
        self._step += 1
        return {output.request_id for output in self._core.step() if output.token_ids}

    def count_steps(self, request_id: RequestId, limit: int) -> int:
        """Return the number of steps until the first token, or more than the limit."""
        for count in range(1, limit + 1):
            if request_id in self.step():
                return count
        return limit + 1


@st.composite
def configs(draw: st.DrawFn, max_num_seqs: int) -> SchedulerConfig:
    threshold = draw(st.sampled_from([4, 16, 64]))
    spare = draw(st.sampled_from([0, 1, 7, 24, 56, 500]))
    return SchedulerConfig(
        max_num_batched_tokens=max_num_seqs + spare,
        max_num_seqs=max_num_seqs,
        policy=SchedulingPolicy.PRIORITY,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=draw(st.sampled_from([None, 1, 2])),
        max_long_partial_prefills=draw(st.sampled_from([None, 1, 2])),
        target_step_s=draw(st.sampled_from([None, 0.001, 0.05])),
        max_loras=1,
    )


def others(lengths: st.SearchStrategy[int], priorities: Sequence[int]) -> st.SearchStrategy[Other]:
    return st.builds(
        Other,
        lengths,
        st.sampled_from(priorities),
        st.sampled_from(["", "", *ADAPTERS]),
        st.sampled_from([1, 30, 300]),
        st.integers(-6, 12),
    )


def max_steps(num_tokens: int, config: SchedulerConfig, most_at_a_time: int) -> int:
    """Return the steps in which half of the prompt tokens suffice, while all other places decode.

    Halves are rounded down at first.
    """
    num_left = config.max_num_batched_tokens - (config.max_num_seqs - 1)
    if config.target_step_s is not None:
        num_left = min(num_left, LEAST_TOKENS)
    return -(-(2 * num_tokens + 1) // min(num_left, 2 * most_at_a_time))


@given(st.data())
def test_a_short_prompt_gets_half_of_each_step_whatever_long_and_lax_ones_there_are(
    data: st.DataObject,
) -> None:
    config = data.draw(configs(max_num_seqs=8))
    threshold = config.long_prefill_token_threshold
    lengths = st.integers(1, threshold)
    long = others(st.integers(threshold + 1, LONGEST), [-1, 0, 1])
    lax = others(st.integers(1, LONGEST), [1, 2])
    engine = _Engine(config, data.draw(st.lists(long | lax, max_size=5)))
    ahead = data.draw(st.lists(lengths, max_size=2))
    for length in ahead:
        engine.add(length, 0, "", 1)
    length = data.draw(lengths)
    short = engine.add(length, 0, "", 4)

    limit = max_steps(sum(ahead) + length, config, threshold)
    assert engine.count_steps(short, limit) <= limit


@given(st.data())
def test_an_urgent_prompt_gets_half_of_each_step_also_in_a_batch_full_of_lax_ones(
    data: st.DataObject,
) -> None:
    config = data.draw(configs(max_num_seqs=3))
    # Of one priority: none was preempted for another before, which happens once only.
    lax = others(st.integers(1, LONGEST), [1])
    engine = _Engine(config, data.draw(st.lists(lax, max_size=9)))
    length = data.draw(st.integers(1, LONGEST))
    urgent = engine.add(length, 0, data.draw(st.sampled_from(["", *ADAPTERS])), 4)

    limit = max_steps(length, config, config.long_prefill_token_threshold)
    limit += 1  # the first step finds that there is no place
    assert engine.count_steps(urgent, limit) <= limit
