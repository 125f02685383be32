"""Hand-off manager without a scheduler: blocks and states."""

from __future__ import annotations

from baton.core.ids import HandoffId, NodeId, Peer
from baton.core.logprobs import FirstToken
from baton.core.request import ReceiveKv
from baton.engine.kv_arrival.handoffs import HandoffManager
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.groups import FULL
from baton.engine.kv_cache.transfer_order import TransferOrder
from baton.engine.scheduler.request import Request, RequestStatus
from baton.kv_transfer.types import Complete, KvOrders, Revoke, Withdraw
from tests.support.requests import make_request

ID = HandoffId("r", 1)
RECEIVE = ReceiveKv(ID, Peer(NodeId("p"), "host:1"))
FIRST = FirstToken(7)
ORDER = TransferOrder([FULL], block_size=2)


def test_orders_are_taken_once() -> None:
    handoffs, request = _receiving()

    first, second = handoffs.take_orders(), handoffs.take_orders()

    assert len(first.receives) == 1
    assert second == KvOrders()
    assert not handoffs.has_orders
    assert list(handoffs.held_blocks()) == request.kv.block_ids[1:]


def test_giving_up_asks_for_a_revoke_and_keeps_the_blocks() -> None:
    handoffs, request = _receiving()
    handoffs.take_orders()

    handoffs.cancel_receive(request)

    assert handoffs.take_orders().revokes == (Revoke(ID),)
    assert list(handoffs.held_blocks()) == request.kv.block_ids[1:]


def test_a_receive_ends_once() -> None:
    handoffs, _ = _receiving()

    handoffs.end_receiving(ID)
    handoffs.end_receiving(ID)

    assert list(handoffs.held_blocks()) == []
    assert handoffs.total_unknown_reports == 1


def test_a_finished_request_is_no_longer_the_receiver() -> None:
    handoffs, request = _receiving()
    before = handoffs.receiver_of(ID)
    request.move(RequestStatus.FINISHED)

    assert before is request
    assert handoffs.receiver_of(ID) is None


def test_blocks_are_sent_once_each() -> None:
    handoffs, request = _sending()

    for num_blocks in (1, 1, 3):
        handoffs.send(request, num_blocks)

    sends = handoffs.take_orders().sends
    assert [(send.first_block, send.block_ids) for send in sends] == [(0, (0,)), (1, (1, 2))]
    assert handoffs.has_sent(request)


def test_a_send_is_completed_or_withdrawn_and_never_both() -> None:
    handoffs, request = _sending()

    handoffs.complete(request, FIRST)
    handoffs.withdraw(request, "too late")

    orders = handoffs.take_orders()
    assert orders.completes == (Complete(ID, 6, FIRST),)
    assert orders.withdraws == ()


def test_a_send_is_pending_until_it_is_ended_on_both_sides() -> None:
    handoffs, request = _sending()
    handoffs.withdraw(request, "abort")
    before = handoffs.num_sending

    handoffs.end_sending(ID)

    assert handoffs.take_orders().withdraws == (Withdraw(ID, "abort"),)
    assert (before, handoffs.num_sending) == (1, 0)


def test_an_early_end_of_a_send_releases_its_blocks_and_stops_orders() -> None:
    handoffs, request = _sending()
    handoffs.send(request, 2)
    handoffs.take_orders()

    handoffs.end_sending(ID)
    handoffs.send(request, 3)
    handoffs.complete(request, FIRST)

    assert handoffs.take_orders() == KvOrders()
    assert list(handoffs.held_blocks()) == []
    assert handoffs.num_sending == 0


def test_a_send_ends_once() -> None:
    handoffs, _ = _sending()

    handoffs.end_sending(ID)
    handoffs.end_sending(ID)

    assert handoffs.total_unknown_reports == 1


def _receiving() -> tuple[HandoffManager, Request]:
    """Return a request of six tokens in three blocks, of which the first was a prefix hit."""
    pool = BlockPool(4)
    handoffs, request = HandoffManager(pool, ORDER), make_request(range(6))
    request.receive = RECEIVE
    request.kv.block_tables = (pool.allocate(3) or [],)
    handoffs.expect(RECEIVE)
    handoffs.receive(request, RECEIVE, num_hits=1)
    request.move(RequestStatus.WAITING_FOR_REMOTE_KVS)
    return handoffs, request


def _sending() -> tuple[HandoffManager, Request]:
    pool = BlockPool(4)
    handoffs, request = HandoffManager(pool, ORDER), make_request(range(6), send_to=ID)
    request.kv.block_tables = (pool.allocate(3) or [],)
    handoffs.open_send(ID)
    return handoffs, request
