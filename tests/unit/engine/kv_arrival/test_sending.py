"""Prefill side of a hand-off in the scheduler: send orders and the end of a send."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import BlockId, HandoffId, RequestId
from baton.core.output import FinishReason
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan
from baton.engine.scheduler.config import SchedulerConfig
from baton.kv_transfer.types import KvOrders, Send, Withdraw
from tests.support.engine_world import EngineWorld
from tests.support.fake_runner import logprob_of
from tests.support.requests import make_engine_request
from tests.support.scheduler_state import awaits_peers

_config = partial(SchedulerConfig, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)


def test_full_blocks_are_sent_after_their_chunk_and_the_last_block_with_the_first_token() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=6), block_size=4)
    name = world.add(14, sends=True, max_tokens=9)

    orders = [world.step().kv_orders for _ in range(4)]

    sends = [order.sends for order in orders]
    assert sends == [
        (),
        (_send(name, 0, 0),),
        (_send(name, 1, 1, 2),),
        (_send(name, 3, 3),),
    ]
    assert [len(order.completes) for order in orders] == [0, 0, 0, 1]
    world.run_to_end()


def test_layers_are_ordered_for_the_blocks_that_the_coming_pass_completes() -> None:
    config = _config(max_num_batched_tokens=6, push_layers=True)
    world = EngineWorld(config, block_size=4)
    name = world.add(14, sends=True, max_tokens=9)

    orders = [world.step().kv_orders for _ in range(4)]

    # A block that is half full after a chunk is completed, and sent, by the next one.
    assert [order.layer_sends for order in orders] == [
        (_layers(name, 0, 0),),
        (_layers(name, 1, 1, 2),),
        (_layers(name, 3, 3),),
        (),
    ]
    assert [order.sends for order in orders] == [
        (),
        (_send(name, 0, 0),),
        (_send(name, 1, 1, 2),),
        (_send(name, 3, 3),),
    ]
    world.run_to_end()


def test_blocks_with_layers_in_flight_stay_held_after_a_failed_pass() -> None:
    world = EngineWorld(_config(push_layers=True), block_size=4)
    name = world.add(14, sends=True, max_tokens=9)
    world.fail_next_token(name)

    world.step()
    stats = world.scheduler.stats()

    assert world.finish_reason(name) is FinishReason.ERROR
    assert stats.num_blocks - stats.num_free_blocks == 4
    world.run_to_end()


def test_the_completion_has_the_token_count_and_the_first_token_with_logprobs() -> None:
    world = EngineWorld(_config())
    name = world.add(6, sends=True, sampling=SamplingParams(max_tokens=9, logprobs=1))
    world.step()

    (complete,) = world.step().kv_orders.completes

    assert complete.handoff_id == _handoff(name)
    assert complete.num_tokens == 6
    assert complete.first_token is not None
    assert [complete.first_token.token_id] == world.tokens(name)
    assert complete.first_token.logprobs == logprob_of(complete.first_token.token_id)
    world.run_to_end()


def test_the_completion_counts_prior_output_tokens() -> None:
    world = EngineWorld(_config())
    world.add(6, prior=[1, 2], sends=True, max_tokens=9)
    world.step()

    (complete,) = world.step().kv_orders.completes

    assert complete.num_tokens == 8
    world.run_to_end()


def test_a_sender_finishes_as_handed_off_with_its_first_token() -> None:
    world = EngineWorld(_config())
    name = world.add(6, sends=True, max_tokens=9)

    world.step()

    assert world.finish_reason(name) is FinishReason.HANDED_OFF
    assert len(world.tokens(name)) == 1
    world.run_to_end()


def test_a_first_token_that_ends_the_request_still_completes_the_hand_off() -> None:
    """Decode ends by the same rule. A withdrawal would make it compute the prompt again."""
    answer, _ = EngineWorld().alone(make_engine_request([5, 4, 3]))
    world = EngineWorld(_config(eos_token_ids=frozenset(answer[:1])))
    name = world.add([5, 4, 3], sends=True)
    world.step()

    plan = world.step()

    assert world.finish_reason(name) is FinishReason.STOP
    assert len(plan.kv_orders.completes) == 1
    world.run_to_end()


def test_a_sender_with_max_tokens_of_one_finishes_by_length() -> None:
    world = EngineWorld(_config())
    name = world.add(6, sends=True, max_tokens=1)

    world.run_to_end()

    assert world.finish_reason(name) is FinishReason.LENGTH


def test_blocks_that_were_cached_are_sent_with_the_first_plan() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(12, max_tokens=2)
    world.run_to_end()
    name = world.add(12, sends=True)

    plan = world.step()

    (send,) = plan.kv_orders.sends
    assert (send.handoff_id, send.first_block, len(send.block_ids)) == (_handoff(name), 0, 2)
    assert plan.num_scheduled_tokens == {name: 4}
    world.run_to_end()


def test_sent_blocks_are_not_reused_before_the_transfer_completes() -> None:
    world = EngineWorld(_config(), num_blocks=4, block_size=4)
    name = world.add(13, sends=True)
    world.step()
    world.add([9] * 5)

    held = [world.step() for _ in range(3)]
    world.wire.end_sending(_handoff(name))
    world.step()
    after = world.step()

    assert [plan.started for plan in held] == [()] * 3
    assert len(after.started) == 1
    world.run_to_end()


def test_sent_blocks_stay_in_the_prefix_cache() -> None:
    world = EngineWorld(_config(), block_size=4)
    world.add(9, sends=True)
    world.run_to_end()

    world.add(9, sends=True)

    (row,) = world.step().started
    assert row.num_computed_tokens == 8
    world.run_to_end()


def test_aborting_a_send_withdraws_it_and_keeps_blocks_that_are_being_read() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4), num_blocks=4, block_size=4)
    name = world.add(13, sends=True)
    world.step()
    world.step()

    world.abort(name)
    plan = world.step()
    free_before = world.scheduler.stats().num_free_blocks
    world.wire.end_sending(_handoff(name))
    world.step()

    assert plan.kv_orders.withdraws == (Withdraw(_handoff(name), "abort"),)
    assert (free_before, world.scheduler.stats().num_free_blocks) == (2, 4)
    world.run_to_end()


def test_aborting_before_anything_was_sent_withdraws_too() -> None:
    world = EngineWorld(_config())
    name = world.add(6, sends=True)

    world.abort(name)

    assert world.step() == Plan(kv_orders=KvOrders(withdraws=(Withdraw(_handoff(name), "abort"),)))
    assert awaits_peers(world.scheduler)
    world.run_to_end()


def test_withdrawing_a_completed_hand_off_happens_once_and_keeps_its_blocks() -> None:
    world = EngineWorld(_config(), num_blocks=4, block_size=4)
    name = world.add(13, sends=True)
    world.step()
    world.step()

    for _ in range(2):
        world.withdraw_completed(_handoff(name))
    plan = world.step()

    assert plan.kv_orders == KvOrders(withdraws=(Withdraw(_handoff(name), "nobody wants it"),))
    assert world.scheduler.stats().num_free_blocks == 0
    world.run_to_end()


def test_a_granted_prompt_gets_the_blocks_of_the_last_hand_off_without_a_grant() -> None:
    world = EngineWorld(_config(), num_blocks=8, block_size=4)
    held = [world.add([number] * 16, sends=True) for number in range(2)]
    name = world.add([9] * 13, sends=True)
    for _ in range(2):
        world.step()
    before = [world.step().kv_orders for _ in range(3)]

    world.wire.grant(_handoff(name))
    world.step()
    plans = [world.step() for _ in range(2)]

    assert before == [KvOrders()] * 3
    reason = "the prefill node was full, and granted hand-offs needed its blocks"
    assert [plan.kv_orders.withdraws for plan in plans] == [
        (Withdraw(_handoff(held[1]), reason),),
        (),
    ]
    world.wire.end_sending(_handoff(held[1]))
    world.step()
    assert world.step().num_scheduled_tokens == {name: 13}
    world.run_to_end()


@pytest.mark.parametrize("is_early", [True, False])
def test_nothing_is_withdrawn_while_a_granted_hand_off_will_end(is_early: bool) -> None:
    world = EngineWorld(_config(), num_blocks=8, block_size=4)
    if is_early:
        world.wire.grant(_handoff(RequestId("r1")))
    for number in range(2):
        world.add([number] * 16, sends=True)
    name = world.add([9] * 13, sends=True)
    for _ in range(3):
        world.step()
    if not is_early:
        world.wire.grant(_handoff(RequestId("r1")))

    world.wire.grant(_handoff(name))
    assert [world.step().kv_orders.withdraws for _ in range(3)] == [()] * 3
    world.wire.end_sending(_handoff(RequestId("r1")))
    world.step()
    assert world.step().num_scheduled_tokens == {name: 13}
    world.run_to_end()


def test_nothing_is_withdrawn_while_a_store_holds_blocks() -> None:
    world = EngineWorld(
        _config(), num_blocks=8, block_size=4, external_chance=Random(0), external_fails=False
    )
    assert world.external is not None
    world.external.can_end = lambda store: False
    for number in range(2):
        world.add([number] * 16, sends=True)
    world.wire.grant(_handoff(world.add([9] * 13, sends=True)))

    during = [world.step().kv_orders.withdraws for _ in range(5)]
    num_stores = len(world.external.stores)
    world.external.can_end = lambda store: True
    world.step_until(lambda plan: plan.kv_orders.withdraws)

    assert during == [()] * 5
    assert num_stores
    world.run_to_end()


def test_withdrawing_a_completed_hand_off_does_not_affect_a_running_request() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4), block_size=4)
    name = world.add(13, sends=True)
    world.step()

    world.withdraw_completed(_handoff(name))

    world.run_to_end()
    assert world.finish_reason(name) is FinishReason.HANDED_OFF


def test_an_error_withdraws_the_hand_off_with_its_reason() -> None:
    world = EngineWorld(_config())
    name = world.add(6, sends=True)
    world.fail_next_token(name)
    world.step()

    (withdraw,) = world.step().kv_orders.withdraws

    assert withdraw.reason == "the logits are not finite"
    world.run_to_end()


def test_a_sender_without_its_peer_computes_its_first_token_and_sends_nothing_more() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4), block_size=4)
    name = world.add(13, sends=True)
    world.step()
    world.step()

    world.wire.end_sending(_handoff(name))
    world.step()
    orders = [world.step().kv_orders for _ in range(3)]

    assert orders == [KvOrders()] * 3
    assert world.finish_reason(name) is FinishReason.HANDED_OFF
    world.run_to_end()


def test_a_sender_that_has_sent_blocks_is_not_preempted() -> None:
    """Its hand-off would hold the old blocks while it waits for new ones, forever."""
    world = EngineWorld(
        _config(max_num_batched_tokens=5),
        num_blocks=6,
        block_size=4,
        enable_prefix_caching=False,
    )
    decoding = world.add([9] * 3, max_tokens=8)
    world.step()
    sender = world.add(20, sends=True)
    world.step()

    world.run_to_end()

    assert world.scheduler.stats().total_preemptions >= 1
    assert world.runner.num_computed[sender] == 20
    assert world.finish_reason(decoding) is FinishReason.LENGTH


def test_a_sender_with_a_partial_prompt_sends_only_full_blocks() -> None:
    world = EngineWorld(_config(max_num_batched_tokens=4), block_size=3)
    world.add(9, sends=True)

    counts = [sum(len(s.block_ids) for s in world.step().kv_orders.sends) for _ in range(4)]

    assert counts == [0, 1, 1, 1]
    world.run_to_end()


def test_a_hand_off_id_cannot_be_sent_twice_at_once() -> None:
    world = EngineWorld(_config())
    world.add(6, request_id="same", sends=True)
    world.step()

    with pytest.raises(InvalidRequest, match="hand-off same#1 is in use"):
        world.add(6, request_id="same", sends=True)
    world.run_to_end()


def _handoff(name: RequestId) -> HandoffId:
    return HandoffId(name, 1)


def _send(name: RequestId, first_block: int, *block_ids: int) -> Send:
    return Send(_handoff(name), first_block, tuple(BlockId(n) for n in block_ids))


def _layers(name: RequestId, first_block: int, *block_ids: int) -> Send:
    return Send(_handoff(name), first_block, tuple(BlockId(n) for n in block_ids))
