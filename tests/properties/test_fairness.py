"""A client whose streams fill the KV cache delays those of other clients by a few steps only."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import HandoffId, RequestId
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import RunResult
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.types import KvReports
from tests.support.hypothesis_profiles import num_examples
from tests.support.requests import make_engine_request

NUM_BLOCKS, BLOCK_SIZE = 128, 4
NUM_STREAMS = 50
MAX_STEPS_TO_START = 4
SHARE_TOKENS = NUM_BLOCKS // 2 * BLOCK_SIZE


@dataclass
class World:
    """A scheduler whose requests get a token in each step that computes them."""

    scheduler: Scheduler = field(
        default_factory=lambda: Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=1024,
                max_num_seqs=NUM_STREAMS + 8,
                max_model_len=NUM_BLOCKS * BLOCK_SIZE,
                policy=SchedulingPolicy.PRIORITY,
            ),
            CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        )
    )
    num_preemptions: dict[str, int] = field(default_factory=dict)  # by ended request
    num_steps: int = 0

    def add(self, name: str, num_prompt: int, max_tokens: int, client: str) -> None:
        prompt = [int(name.rpartition("-")[2]), *range(1, num_prompt)]  # shared with no other
        self.scheduler.add(
            make_engine_request(prompt, request_id=name, max_tokens=max_tokens, client=client)
        )

    def step(self) -> set[str]:
        """Return the requests that get a token."""
        self.num_steps += 1
        plan = self.scheduler.schedule(float(self.num_steps))
        outputs = self.scheduler.update(
            plan, RunResult({request_id: [1] for request_id in plan.num_scheduled_tokens})
        )
        for output in outputs:
            if output.served is not None:
                self.num_preemptions[output.request_id] = output.served.num_preemptions
        return {output.request_id for output in outputs if output.token_ids}

    def end(self) -> None:
        self.scheduler.abort_all()
        self.step()
        self.scheduler.check()

    def run_to_end(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.request_ids():
                break
            self.step()
        assert not self.scheduler.request_ids()
        self.scheduler.check()


def filled(num_prompt: int = 5, client: str = "many") -> World:
    """Return a world whose KV cache the streams of one client have filled."""
    it = World()
    for number in range(NUM_STREAMS):
        it.add(f"{client}-{number}", num_prompt, 200, client)
    for _ in range(40):
        it.step()
    assert it.scheduler.stats().total_preemptions
    return it


def test_a_bystander_gets_a_token_in_each_step_while_another_client_fills_the_cache() -> None:
    it = filled()
    it.add("bystander-99", 40, 100, "one")
    steps = [it.step() for _ in range(MAX_STEPS_TO_START + 99)]

    tokens = ["bystander-99" in each for each in steps]
    assert tokens.index(True) < MAX_STEPS_TO_START
    assert sum(tokens) == 100  # without a gap
    assert it.num_preemptions[RequestId("bystander-99")] == 0
    it.run_to_end()


@settings(max_examples=num_examples(10))
@given(
    num_prompt=st.integers(1, 40),
    bystanders=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 30)),
        min_size=1,
        max_size=6,
    ),
)
def test_requests_within_the_share_of_their_client_start_soon_and_are_never_preempted(
    num_prompt: int, bystanders: list[tuple[int, int, int]]
) -> None:
    it = filled(num_prompt)
    for number, (num_tokens, max_tokens, num_steps) in enumerate(bystanders):
        name = f"bystander-{number}"
        it.add(name, num_tokens, max_tokens, "one")
        steps = [it.step() for _ in range(MAX_STEPS_TO_START + max_tokens - 1 + num_steps)]
        assert [name in each for each in steps].index(True) < MAX_STEPS_TO_START
        assert it.num_preemptions[name] == 0
    it.end()


@settings(max_examples=num_examples(5))
@given(st.lists(st.integers(1, 120), min_size=2, max_size=6))
def test_clients_that_never_stop_do_not_keep_a_large_request_from_its_end(
    prompts: list[int],
) -> None:
    it = World()
    for number in range(600):
        it.add(f"small-{number}", prompts[number % len(prompts)], 20, f"client-{number}")
        if number == 20:
            it.add("large-99", SHARE_TOKENS, 40, "large")
        it.step()
        if RequestId("large-99") in it.num_preemptions:
            break

    assert RequestId("large-99") in it.num_preemptions
    it.end()


@pytest.mark.parametrize("client", ["", "many"])
def test_without_other_clients_the_last_to_arrive_is_preempted(client: str) -> None:
    it = filled(client=client)
    it.run_to_end()

    assert it.num_preemptions[RequestId(f"{client}-0")] == 0
    assert it.num_preemptions[RequestId(f"{client}-{NUM_STREAMS - 1}")] > 0


@dataclass
class PrefillWorld(World):
    """A world of hand-offs, which hold their blocks until the decode node has read them."""

    handoffs: list[HandoffId] = field(default_factory=list)

    def add(self, name: str, num_prompt: int, max_tokens: int, client: str) -> None:
        prompt = [int(name.rpartition("-")[2]), *range(1, num_prompt)]
        handoff_id = HandoffId(RequestId(name), 1)
        self.scheduler.add(
            make_engine_request(
                prompt, request_id=name, max_tokens=max_tokens, client=client, send_to=handoff_id
            )
        )

    def step(self, *read: HandoffId) -> set[str]:
        self.num_steps += 1
        plan = self.scheduler.schedule(float(self.num_steps))
        tokens = {request_id: [1] for request_id in plan.num_scheduled_tokens}
        self.handoffs += [each.handoff_id for each in plan.kv_orders.completes]
        self.scheduler.update(plan, RunResult(tokens), KvReports(finished_sending=read))
        return set(tokens)

    def end(self) -> None:
        self.scheduler.abort_all()
        for _ in range(2):
            self.step(*self.handoffs)
        self.scheduler.check()
        assert self.scheduler.stats().num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("num_prompt", [1, 5, 30])
def test_a_bystander_is_computed_while_no_hand_off_of_another_client_ends(num_prompt: int) -> None:
    it = PrefillWorld()
    for number in range(NUM_BLOCKS):
        it.add(f"many-{number}", num_prompt, 200, "many")
    for _ in range(40):
        it.step()
    it.add("bystander-999", 100, 100, "one")

    assert "bystander-999" in it.step()
    it.end()


def test_a_large_bystander_is_the_next_once_hand_offs_of_another_client_end() -> None:
    it = PrefillWorld()
    for number in range(NUM_STREAMS):
        it.add(f"many-{number}", 4 * BLOCK_SIZE, 200, "many")
    for _ in range(40):
        it.step()
    it.add("bystander-999", SHARE_TOKENS, 100, "one")  # twice what is reserved

    computed = [it.step(it.handoffs.pop(0)) for _ in range(NUM_BLOCKS // 4 // 4 + 1)]
    assert ["bystander-999" in each for each in computed].index(True) == NUM_BLOCKS // 4 // 4
    it.end()


def test_one_client_fills_three_quarters_of_the_cache_with_hand_offs() -> None:
    it = PrefillWorld()
    for number in range(NUM_BLOCKS):
        it.add(f"many-{number}", BLOCK_SIZE, 200, "many")
    for _ in range(40):
        it.step()

    assert it.scheduler.stats().num_free_blocks == NUM_BLOCKS // 4
    it.end()
