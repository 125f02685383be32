"""Random histories of an engine with tiny caches, a hostile wire and faults of all kinds.

No block is lost, every request ends, and each request gets the tokens that it would get alone.
The simulation that checks this is in tests/support/engine_world.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baton.core.errors import InvalidRequest
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.pause_mode import PauseMode
from baton.core.pooling import Pooling, PoolingKind
from baton.core.request import EMBED, Task
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.groups import FULL, ONE_GROUP, KvCacheSpec, KvGroup
from baton.engine.scheduler.config import LoadFailurePolicy, SchedulerConfig, SchedulingPolicy
from tests.support.engine_world import VOCAB_SIZE, EngineWorld
from tests.support.hypothesis_profiles import num_examples
from tests.support.random_histories import (
    HINTS,
    run_history,
    run_priced_loads,
    run_stream,
    run_texts,
)

SOME = st.integers(0, 1000)  # picks one of however many there are
TOKENS = st.integers(0, VOCAB_SIZE - 1)
NUM_HISTORIES = num_examples(500)
NUM_STREAMS = num_examples(24)
NUM_PARTS = 3  # that run at the same time

_T = TypeVar("_T")


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    threshold = draw(st.sampled_from([0, 2, 5]))
    max_num_seqs = draw(st.integers(1, 4))
    # Up to more than a block, so that a block too many would not go unnoticed.
    num_lookahead_tokens = draw(st.sampled_from([0, 2, 5]))
    return SchedulerConfig(
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 1, 3, 8, 40])),
        max_num_seqs=max_num_seqs,
        max_model_len=draw(st.sampled_from([7, 12, 16, 30])),
        eos_token_ids=frozenset(draw(st.sampled_from([(), (1,)]))),
        policy=draw(st.sampled_from(SchedulingPolicy)),
        enable_chunked_prefill=bool(threshold) or draw(st.booleans()),
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=draw(st.sampled_from([None, 1, 2])),
        max_long_partial_prefills=draw(st.sampled_from([None, 1])) if threshold else None,
        num_lookahead_tokens=num_lookahead_tokens,
        kv_load_failure_policy=draw(st.sampled_from(LoadFailurePolicy)),
        remote_headroom_blocks=draw(st.integers(0, 2)),
        pooling=Pooling(draw(st.sampled_from(PoolingKind))),
        max_loras=draw(st.integers(1, 2)),
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Draw prompts, many of them with a common prefix, so that the prefix cache is used."""
    shared = draw(st.integers(0, 12))
    own = draw(st.lists(TOKENS, min_size=0 if shared else 1, max_size=6))
    return [place % VOCAB_SIZE for place in range(shared)] + own


specs = st.one_of(
    st.just(FULL),
    st.integers(1, 9).map(lambda size: KvCacheSpec(window=size)),
    st.integers(1, 9).map(lambda size: KvCacheSpec(chunk=size)),
)
some_groups = st.one_of(
    st.just(ONE_GROUP),
    st.lists(specs.map(KvGroup), min_size=1, max_size=4).map(tuple),
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = EngineWorld()

    @initialize(
        config=configs(),
        num_blocks=st.integers(4, 20),
        block_size=st.integers(1, 4),
        groups=some_groups,
        num_state_blocks=st.sampled_from([0, 0, 1, 2]),
        enable_prefix_caching=st.booleans(),
        has_external=st.booleans(),
        prices=st.sampled_from([None, None, (0.01, 0.001), (0.01, 0.2), (0.001, 5.0)]),
        runs_ahead=st.booleans(),
        max_rows=st.sampled_from([1, 3, 16]),
    )
    def start(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        groups: tuple[KvGroup, ...],
        num_state_blocks: int,
        enable_prefix_caching: bool,
        has_external: bool,
        prices: tuple[float, float] | None,
        runs_ahead: bool,
        max_rows: int,
    ) -> None:
        self.world = EngineWorld(
            config,
            num_blocks=num_blocks * len(groups)
            + (3 + config.num_lookahead_tokens) * num_state_blocks,
            block_size=block_size,
            groups=groups,
            num_state_blocks=num_state_blocks,
            enable_prefix_caching=enable_prefix_caching,
            chance=random.Random(0),
            external_chance=random.Random(0) if has_external else None,
            runs_ahead=runs_ahead,
        )
        self.world.runner.max_rows = max_rows
        if has_external and prices is not None:
            errors = random.Random(1)
            self.world.price(*prices, lambda: errors.choice([1.0, 1.0, 0.02, 50.0]))

    @rule(
        prompt=prompts(),
        num_left=st.sampled_from([None, None, 1, 2, 5]),
        role=st.sampled_from(["local", "receives", "sends"]),
        max_tokens=st.sampled_from([1, 2, 5, 12, 40]),
        priority=st.integers(0, 2),
        cache_salt=st.sampled_from(["", "tenant"]),
        ignore_eos=st.booleans(),
        wants_logprobs=st.booleans(),
        num_promised=st.sampled_from([None, 4, 30]),
        hints=st.sampled_from(HINTS),
        adapter=st.sampled_from(["", "", "a", "b", "c"]),
        task=st.sampled_from([None, EMBED]),
    )
    def add(
        self,
        prompt: list[int],
        num_left: int | None,
        role: str,
        max_tokens: int,
        priority: int,
        cache_salt: str,
        ignore_eos: bool,
        wants_logprobs: bool,
        num_promised: int | None,
        hints: KvHints,
        adapter: str,
        task: Task | None,
    ) -> None:
        wanted = 1 if wants_logprobs else None
        if num_left is not None:  # as long as the model takes, but for so many tokens
            num_tokens = max(1, self.world.config.max_model_len - num_left)
            prompt = (prompt * num_tokens)[:num_tokens]
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            logprobs=wanted,
            prompt_logprobs=wanted,
        )
        try:
            self.world.add(
                prompt,
                receives=role == "receives",
                sends=role == "sends",
                priority=priority,
                cache_salt=cache_salt,
                sampling=sampling,
                num_promised=num_promised,
                kv_hints=hints if role == "local" or not hints.prefetch else NO_KV_HINTS,
                adapter=adapter,
                task=task if role == "local" else None,
            )
        except InvalidRequest:
            return

    @rule(
        shared=st.integers(1, 12),
        own=st.lists(st.lists(TOKENS, max_size=4), min_size=2, max_size=4),
        max_tokens=st.sampled_from([1, 2, 12]),
    )
    def add_burst(self, shared: int, own: list[list[int]], max_tokens: int) -> None:
        """Add prompts with a common prefix, all received at once."""
        for tail in own:
            prompt = [place % VOCAB_SIZE for place in range(shared)] + tail
            with suppress(InvalidRequest):
                self.world.add(prompt, receives=True, max_tokens=max_tokens)

    @rule(seconds=st.sampled_from([0.1, 5.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.living())
    @rule(pick=SOME)
    def abort(self, pick: int) -> None:
        self.world.abort(_pick(self.world.living(), pick))

    @precondition(lambda self: self.world.living())
    @rule(pick=SOME)
    def fail_next_token(self, pick: int) -> None:
        self.world.fail_next_token(_pick(self.world.living(), pick))

    @precondition(lambda self: self.world.wire.known_names)
    @rule(picks=st.lists(SOME, min_size=1, max_size=3))
    def pull_as_a_peer(self, picks: list[int]) -> None:
        self.world.request_blocks([_pick(self.world.wire.known_names, each) for each in picks])

    @rule()
    def evict_cached(self) -> None:
        self.world.evict_cached()

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running: bool) -> None:
        self.world.reset_prefix_cache(reset_running=reset_running)

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        self.world.pause(mode)

    @rule()
    def resume(self) -> None:
        self.world.resume()

    @precondition(lambda self: self.world.wire.incoming)
    @rule(pick=SOME)
    def land(self, pick: int) -> None:
        self.world.wire.land(_pick(list(self.world.wire.incoming), pick))

    @precondition(lambda self: self.world.wire.wanted())
    @rule(pick=SOME, num_proved=st.integers(0, 4))
    def lose(self, pick: int, num_proved: int) -> None:
        self.world.wire.lose(_pick(self.world.wire.wanted(), pick), num_proved)

    @precondition(lambda self: self.world.wire.unwanted())
    @rule(pick=SOME)
    def release(self, pick: int) -> None:
        self.world.wire.release(_pick(self.world.wire.unwanted(), pick))

    @precondition(lambda self: self.world.wire.endable())
    @rule(pick=SOME)
    def end_sending(self, pick: int) -> None:
        self.world.wire.end_sending(_pick(self.world.wire.endable(), pick))

    def teardown(self) -> None:
        self.world.run_to_end()


TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("first", range(NUM_PARTS))
def test_random_histories_leak_no_block_and_every_answer_equals_that_alone(first: int) -> None:
    for seed in range(first, NUM_HISTORIES, NUM_PARTS):
        run_history(seed)


def test_random_histories_of_an_encoder_need_no_blocks() -> None:
    for seed in range(num_examples(100)):
        run_texts(seed)


@pytest.mark.parametrize("first", range(NUM_PARTS))
def test_every_request_ends_in_bounded_time_despite_many_slow_loads_of_others(
    first: int,
) -> None:
    for seed in range(first, NUM_STREAMS, NUM_PARTS):
        try:
            run_stream(seed)
        except AssertionError as failure:
            failure.add_note(f"stream {seed}")
            raise


def test_loads_are_started_if_they_are_expected_to_be_faster_than_computing() -> None:
    for seed in range(num_examples(30)):
        run_priced_loads(seed)


def _pick(things: Sequence[_T], pick: int) -> _T:
    return things[pick % len(things)]
