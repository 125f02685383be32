"""Kill or stop either node of a pair in each phase of a hand-off; the other node continues.

Each phase is a state that lasts: a call not yet made, a forward pass blocked at the gate, or a
stopped peer. No case depends on timing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from baton.core.ids import HandoffId
from baton.core.sampling import SamplingParams
from tests.support.engine_nodes import EngineNode
from tests.support.engine_pair import Call, Pair, PairOptions, greedy
from tests.support.models import prompt_of, reference_greedy

LENGTH, NUM_TOKENS = 200, 12  # 9 chunks, and an answer that ends in the next block
LEASE_S = 1.0
FREE_WITHIN_S = 2 * LEASE_S + 1

pytestmark = pytest.mark.slow


class Phase(Enum):
    BEFORE_GRANT = "before the grant"
    GRANTED = "granted, nothing written"
    BETWEEN_CHUNKS = "between two chunks"
    BEFORE_DONE = "all posted, Done not seen"
    DECODING = "decoding"


@dataclass(slots=True)
class Story:
    """One request in progress and its calls."""

    pair: Pair
    prompt: tuple[int, ...]
    sampling: SamplingParams
    handoff_id: HandoffId
    prefill: Call | None = None
    decode: Call | None = None

    def start_prefill(self) -> Call:
        self.prefill = self.pair.prefill(self.handoff_id, self.prompt, self.sampling)
        return self.prefill

    def start_decode(self) -> Call:
        self.decode = self.pair.decode(self.handoff_id, self.prompt, self.sampling)
        return self.decode


# A dead process must be detected by its links alone: leases and timeouts are too long.
PATIENCE_S = {"killed": (600.0, 600.0), "stopped": (LEASE_S, 1.5)}


@pytest.fixture(scope="module", params=["nixl", "nixl tcp", "ucxx"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=PATIENCE_S)
def fault(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lasting_pair(model_folder: Path, kind: str, fault: str) -> Iterator[Pair]:
    lease_s, silence_s = PATIENCE_S[fault]
    options = PairOptions(
        model_folder, kind, lease_s=lease_s, silence_s=silence_s, write_timeout_s=2.0
    )
    with Pair(options) as running:
        yield running


@pytest.fixture
def pair(lasting_pair: Pair) -> Iterator[Pair]:
    """Restore both nodes after each test."""
    yield lasting_pair
    lasting_pair.heal()


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_the_other_node_keeps_serving_and_every_block_is_released(
    pair: Pair, model_folder: Path, victim: str, fault: str, phase: Phase
) -> None:
    prompt = prompt_of(LENGTH, seed=hash_of(victim, fault, phase))
    expected = reference_greedy(model_folder, prompt, NUM_TOKENS)
    ailing, other = (pair.p, pair.d) if victim == "prefill" else (pair.d, pair.p)
    pid, story = other.pid, Story(pair, prompt, greedy(NUM_TOKENS), pair.new_id())
    bring_to(story, phase)

    ailing.kill() if fault == "killed" else ailing.stop()
    go_on(story, phase, ailing)
    if fault == "stopped" and ailing is pair.d and story.prefill is not None:
        assert_prefill_gives_up(story, phase)

    if ailing is pair.p:
        assert decoded(story) == expected
    else:
        assert_prefill_serves(pair)
    is_held = story.decode is None  # prefill waits for a grant
    if fault == "killed" and not is_held:
        pair.await_free_on(other, FREE_WITHIN_S)
    revive(ailing, fault)
    if is_held or fault == "stopped":
        assert decoded(story) == expected
    if story.prefill is not None:
        story.prefill.disconnect()
    pair.await_all_free(FREE_WITHIN_S)
    again = pair.answer(prompt, greedy(NUM_TOKENS))
    assert again.token_ids == expected
    assert again.was_handed_over
    assert other.is_alive
    assert other.pid == pid
    pair.await_all_free()


def hash_of(victim: str, fault: str, phase: Phase) -> int:
    """Return a seed that is unique for the case, so that no prompt hits the blocks of another."""
    return 1000 + 100 * (victim == "decode") + 10 * (fault == "stopped") + list(Phase).index(phase)


def bring_to(story: Story, phase: Phase) -> None:
    pair = story.pair
    assert pair.answer((5, 6, 7), greedy(2)).was_handed_over  # the pair is linked
    if phase is Phase.BEFORE_GRANT:
        story.start_prefill().until_tokens(1)
        return
    if phase is Phase.DECODING:
        pair.d.hold_before_pass(5)
        story.start_prefill()
        story.start_decode().until_tokens(5)
        pair.d.await_held()
        return
    story.start_decode()
    pair.await_granted()
    if phase is Phase.GRANTED:
        return
    pair.p.hold_before_pass(5)
    story.start_prefill()
    pair.p.await_held()
    if phase is Phase.BEFORE_DONE:
        # The writes of P do not complete while D does not poll.
        pair.d.stop()
        pair.p.let_go()
        assert story.prefill is not None
        story.prefill.until_tokens(1)


def go_on(story: Story, phase: Phase, ailing: EngineNode) -> None:
    """Release the healthy node from the state that the phase required."""
    pair = story.pair
    if phase is Phase.BEFORE_GRANT and ailing is pair.p:
        story.start_decode()
    if phase is Phase.GRANTED and ailing is pair.d:
        story.start_prefill().until_tokens(1)
    if phase is Phase.BETWEEN_CHUNKS and pair.p.is_alive:
        pair.p.let_go()
    if phase is Phase.BEFORE_DONE and ailing is pair.p:
        pair.d.resume()
    if phase is Phase.DECODING and pair.d.is_alive:
        pair.d.let_go()


def revive(ailing: EngineNode, fault: str) -> None:
    if fault == "killed":
        ailing.start()
        ailing.await_ready()
    else:
        ailing.resume()


def decoded(story: Story) -> list[int]:
    decode = story.decode or story.start_decode()
    return decode.to_its_end().token_ids


def assert_prefill_gives_up(story: Story, phase: Phase) -> None:
    """Check that a stopped decode node occupies blocks on prefill for a bounded time only."""
    if phase is not Phase.BEFORE_GRANT and story.prefill is not None:
        assert story.prefill.to_its_end().was_sent
        story.pair.await_free_on(story.pair.p)


def assert_prefill_serves(pair: Pair) -> None:
    call = pair.prefill(pair.new_id(), (9, 8, 7), greedy(1)).until_tokens(1)
    call.disconnect()
