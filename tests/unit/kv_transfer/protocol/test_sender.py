"""Sender of the KV protocol (prefill), event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.ids import BlockId, HandoffId
from baton.core.output import FirstToken
from baton.kv_transfer.config import SenderConfig
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.actions import BreakLink, PostWrite, SendDone, SendMessage
from baton.kv_transfer.protocol.messages import (
    Failed,
    Grant,
    LinkMessage,
    Renew,
    Revoked,
    RevokeGrant,
    Writing,
)
from baton.kv_transfer.protocol.sender import Sender
from baton.kv_transfer.transports.base import WHOLE_BLOCK, LayerRange, Write
from baton.kv_transfer.types import Complete, Requested, Send, Withdraw

LINK = LinkId(1)
ID = HandoffId("r", 0)
BLOCK_BYTES = 8
CONFIG = SenderConfig(
    hold_s=20, write_timeout_s=15, max_in_flight_bytes=32, max_write_bytes=16, num_remembered=10
)


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def grant(*targets: int, first: int = 0, ticket: int = 1, handoff_id: HandoffId = ID) -> Grant:
    return Grant(handoff_id, ticket, first, ids(*targets), lease_s=3)


def complete(handoff_id: HandoffId = ID) -> Complete:
    return Complete(handoff_id, 20, FirstToken(9))


def linked() -> Sender:
    sender = Sender(BLOCK_BYTES, CONFIG)
    sender.link_up(LINK)
    return sender


def pushing() -> Sender:
    """Return a sender with two granted blocks in flight since second 0, as write 1."""
    sender = linked()
    sender.send(Send(ID, 0, ids(1, 2)), 0.0)
    sender.handle_message(LINK, grant(7, 8), 0.0)
    sender.take_actions()
    return sender


def posts(sender: Sender) -> list[Write]:
    return [action.write for action in sender.take_actions() if isinstance(action, PostWrite)]


def sent_messages(sender: Sender) -> list[LinkMessage]:
    return [action.message for action in sender.take_actions() if isinstance(action, SendMessage)]


def test_blocks_computed_before_the_grant_are_posted_when_it_arrives() -> None:
    sender = linked()
    sender.send(Send(ID, 0, ids(1, 2)), 0.0)
    before = posts(sender)

    sender.handle_message(LINK, grant(7, 8), 0.5)

    assert before == []
    assert posts(sender) == [Write(1, 1, 0, ids(1, 2), ids(7, 8))]


def test_blocks_computed_after_the_grant_are_posted_chunk_by_chunk() -> None:
    sender = linked()
    sender.handle_message(LINK, grant(7, 8, 9), 0.0)

    sender.send(Send(ID, 0, ids(1)), 0.1)
    sender.send(Send(ID, 1, ids(2, 3)), 0.2)

    assert posts(sender) == [Write(1, 1, 0, ids(1), ids(7)), Write(2, 1, 1, ids(2, 3), ids(8, 9))]


def test_only_blocks_missing_at_the_decode_node_are_sent() -> None:
    sender = linked()
    sender.send(Send(ID, 0, ids(1, 2, 3, 4)), 0.0)

    sender.handle_message(LINK, grant(9, first=2), 0.0)

    assert posts(sender) == [Write(1, 1, 0, ids(3), ids(9))]


def test_writes_in_flight_are_bounded_and_continue_as_writes_complete() -> None:
    sender = linked()
    sender.send(Send(ID, 0, ids(*range(7))), 0.0)
    sender.handle_message(LINK, grant(*range(10, 17)), 0.0)
    first = posts(sender)

    sender.written(LINK, 1, 0.1)

    assert [len(write.sources) for write in first] == [2, 2]
    assert [write.first for write in posts(sender)] == [4]


def test_no_write_is_posted_after_the_lease_expired_by_the_local_clock() -> None:
    sender = linked()
    sender.handle_message(LINK, grant(7, 8), 0.0)

    sender.send(Send(ID, 0, ids(1)), 2.9)
    sender.send(Send(ID, 1, ids(2)), 3.0)

    assert [write.sources for write in posts(sender)] == [ids(1)]


def test_a_renewed_lease_continues_the_send() -> None:
    sender = linked()
    sender.handle_message(LINK, grant(7, 8), 0.0)
    sender.handle_message(LINK, Renew((ID,), 3), 2.0)

    sender.tick(4.9)
    sender.send(Send(ID, 0, ids(1)), 4.9)

    assert len(posts(sender)) == 1


def test_an_expired_lease_fails_the_send_and_notifies_the_peer() -> None:
    sender = linked()
    sender.handle_message(LINK, grant(7, 8), 0.0)

    sender.tick(3.0)

    assert sent_messages(sender) == [Failed(ID, "the lease ended")]
    assert sender.take_finished() == ()  # unknown to the scheduler


def test_done_is_sent_after_every_write_and_releases_the_source_blocks() -> None:
    sender = linked()
    sender.send(Send(ID, 0, ids(1, 2, 3)), 0.0)
    sender.handle_message(LINK, grant(7, 8, 9), 0.0)
    sender.complete(complete(), 0.1)
    sender.take_actions()

    sender.written(LINK, 1, 0.2)
    after_one = (sender.take_actions(), sender.take_finished())
    sender.written(LINK, 2, 0.3)

    assert after_one == ([], ())
    assert sender.take_actions() == [SendDone(LINK, 1, complete())]
    assert sender.take_finished() == (ID,)


def test_done_is_not_sent_before_the_first_token() -> None:
    sender = pushing()

    sender.written(LINK, 1, 0.1)
    before = sender.take_actions()
    sender.complete(complete(), 0.2)

    assert before == []
    assert sender.take_actions() == [SendDone(LINK, 1, complete())]


def test_a_full_prefix_hit_on_the_decode_node_sends_done_without_a_write() -> None:
    sender = linked()
    sender.send(Send(ID, 0, ids(1, 2)), 0.0)
    sender.complete(complete(), 0.0)

    sender.handle_message(LINK, grant(first=2), 0.1)

    assert sender.take_actions() == [SendDone(LINK, 1, complete())]


def test_a_revoke_is_answered_when_the_last_write_has_ended() -> None:
    sender = pushing()

    sender.handle_message(LINK, RevokeGrant(ID, 1), 0.1)
    before = sent_messages(sender)
    sender.written(LINK, 1, 0.2)

    assert before == []
    assert sent_messages(sender) == [Revoked(ID)]


def test_after_a_revoke_no_write_is_posted_and_the_last_completion_ends_the_send() -> None:
    sender = pushing()
    sender.handle_message(LINK, RevokeGrant(ID, 1), 0.1)
    sender.written(LINK, 1, 0.2)
    sender.take_actions()

    sender.send(Send(ID, 2, ids(3)), 0.3)
    before = sender.take_finished()
    sender.complete(complete(), 0.4)

    assert (before, sender.take_actions()) == ((), [])
    assert sender.take_finished() == (ID,)


def test_a_revoke_that_arrives_before_its_grant_voids_it() -> None:
    sender = linked()
    sender.send(Send(ID, 0, ids(1)), 0.0)

    sender.handle_message(LINK, RevokeGrant(ID, 1), 0.1)
    answers = sent_messages(sender)
    sender.handle_message(LINK, grant(7), 0.2)

    assert answers == [Revoked(ID)]
    assert posts(sender) == []


def test_a_duplicate_grant_is_ignored() -> None:
    sender = pushing()

    sender.handle_message(LINK, grant(7, 8), 0.1)

    assert sender.take_actions() == []
    assert sender.num_dropped == 1


def test_a_withdrawn_send_fails_at_once_and_releases_its_source_after_the_last_write() -> None:
    sender = pushing()

    sender.withdraw(Withdraw(ID, "aborted"), 0.1)
    before = (sent_messages(sender), sender.take_finished())
    sender.written(LINK, 1, 0.2)

    assert before == ([Failed(ID, "aborted")], ())
    assert sender.take_finished() == (ID,)


def test_a_grant_for_a_finished_send_is_refused_by_name() -> None:
    sender = linked()
    sender.withdraw(Withdraw(ID, "aborted"), 0.0)

    sender.handle_message(LINK, grant(7), 0.1)

    assert sent_messages(sender) == [Failed(ID, "aborted")]


def test_an_unclaimed_result_is_dropped_after_a_timeout() -> None:
    sender = linked()
    sender.send(Send(ID, 0, ids(1)), 0.0)
    sender.complete(complete(), 5.0)

    sender.tick(24.9)
    before = sender.take_finished()
    sender.tick(25.0)

    assert before == ()
    assert sender.take_finished() == (ID,)


def test_a_failed_write_closes_the_pair_and_does_not_count_as_completed() -> None:
    sender = pushing()
    sender.complete(complete(), 0.1)

    sender.write_failed(LINK, 1, "reset")
    requested = sender.take_actions()
    sender.handle_message(LINK, RevokeGrant(ID, 1), 0.2)
    unanswered = sender.take_actions()
    before = sender.take_finished()
    sender.handle_link_cut(LINK, "a write failed")

    assert BreakLink(LINK, "a write failed: reset") in requested
    assert not any(isinstance(action, SendDone) for action in requested)
    assert (unanswered, before) == ([], ())
    assert sender.take_finished() == (ID,)


def test_a_write_that_does_not_complete_closes_the_pair() -> None:
    sender = pushing()
    sender.handle_message(LINK, Renew((ID,), 100), 2.0)
    sender.take_actions()

    sender.tick(15.0)

    assert [type(action) for action in sender.take_actions()] == [BreakLink]


def test_a_decode_node_that_wants_blocks_before_the_first_sent_is_refused() -> None:
    sender = linked()
    sender.send(Send(ID, 4, ids(1)), 0.0)

    sender.handle_message(LINK, grant(7, first=2), 0.1)

    assert sent_messages(sender) == [Failed(ID, "granted blocks that were never computed")]


def test_a_decode_node_that_wants_more_than_was_computed_is_refused() -> None:
    sender = pushing()
    sender.handle_message(LINK, grant(7, 8, 9, ticket=2, handoff_id=HandoffId("s", 0)), 0.0)
    sender.send(Send(HandoffId("s", 0), 0, ids(3)), 0.0)
    sender.written(LINK, 2, 0.1)

    sender.complete(complete(HandoffId("s", 0)), 0.2)

    assert Failed(HandoffId("s", 0), "fewer blocks were computed than granted") in sent_messages(
        sender
    )


def test_chunks_must_be_contiguous() -> None:
    sender = pushing()

    with pytest.raises(ValueError, match="do not follow"):
        sender.send(Send(ID, 5, ids(3)), 0.1)


# --- Layers of a pass under way ----------------------------------------------------------


def in_pass(*targets: int, coming: tuple[int, ...], num_sent: int = 0) -> Sender:
    """Return a sender with a grant, whose next blocks a pass of four layers is computing."""
    sender = Sender(BLOCK_BYTES, CONFIG, num_layers=4)
    sender.link_up(LINK)
    if num_sent:
        sender.send(Send(ID, 0, ids(*range(num_sent))), now=0.0)
    sender.send_layers(Send(ID, num_sent, ids(*coming)), now=0.0)
    sender.handle_message(LINK, grant(*targets), now=0.0)
    return sender


def parts(sender: Sender) -> list[tuple[tuple[BlockId, ...], LayerRange]]:
    return [(write.targets, write.layers) for write in posts(sender)]


def test_a_layer_is_sent_after_it_has_been_computed() -> None:
    sender = in_pass(10, 11, coming=(5, 6))

    before = parts(sender)
    sender.layer_done(1, now=0.0)
    sender.layer_done(3, now=0.0)

    assert before == []
    assert parts(sender) == [
        (ids(10, 11), LayerRange(0, 1, 4)),
        (ids(10, 11), LayerRange(1, 3, 4)),
    ]


def test_layers_not_sent_in_a_pass_are_sent_afterwards_and_none_twice() -> None:
    sender = in_pass(10, 11, 12, coming=(5, 6))
    sender.layer_done(3, now=0.0)
    parts(sender)

    sender.send(Send(ID, 0, ids(5, 6, 7)), now=0.0)

    assert parts(sender) == [(ids(10, 11), LayerRange(3, 4, 4)), (ids(12), WHOLE_BLOCK)]


def test_blocks_whose_layers_are_all_sent_are_announced_without_more_writes() -> None:
    sender = in_pass(10, 11, coming=(5, 6))
    sender.layer_done(4, now=0.0)
    written = posts(sender)[0]

    sender.send(Send(ID, 0, ids(5, 6)), now=0.0)
    sender.complete(complete(), now=0.0)
    early = [action for action in sender.take_actions() if isinstance(action, SendDone)]
    sender.written(LINK, written.write_id, now=0.0)
    actions = sender.take_actions()

    assert early == []
    assert [action for action in actions if isinstance(action, PostWrite)] == []
    assert any(isinstance(action, SendDone) for action in actions)


def test_layers_of_blocks_cached_at_the_decode_node_are_not_sent() -> None:
    sender = Sender(BLOCK_BYTES, CONFIG, num_layers=4)
    sender.link_up(LINK)
    sender.send_layers(Send(ID, 0, ids(5, 6, 7)), now=0.0)
    sender.handle_message(LINK, grant(11, 12, first=1), now=0.0)

    sender.layer_done(1, now=0.0)

    assert [(write.sources, write.targets) for write in posts(sender)] == [(ids(6, 7), ids(11, 12))]


def test_no_layer_is_sent_without_a_valid_lease_or_after_a_revoke() -> None:
    late, revoked = in_pass(10, coming=(5,)), in_pass(10, coming=(5,))

    late.layer_done(1, now=3.0)
    revoked.handle_message(LINK, RevokeGrant(ID, 1), now=0.0)
    revoked.layer_done(1, now=0.0)

    assert parts(late) == parts(revoked) == []


def test_a_layer_in_flight_holds_its_source_blocks_after_a_failed_pass() -> None:
    sender = in_pass(10, coming=(5,))
    sender.layer_done(1, now=0.0)
    written = posts(sender)[0]

    sender.withdraw(Withdraw(ID, "failed"), now=0.0)
    held = sender.take_finished()
    sender.written(LINK, written.write_id, now=0.0)

    assert held == ()
    assert sender.take_finished() == (ID,)


def test_a_send_must_begin_with_the_blocks_announced_by_send_layers() -> None:
    sender = in_pass(10, coming=(5,))

    with pytest.raises(ValueError, match="differ from those sent by layer"):
        sender.send(Send(ID, 0, ids(6)), now=0.0)


def test_blocks_count_as_written_once_all_their_layers_and_earlier_blocks_are() -> None:
    sender = in_pass(10, 11, coming=(5,))
    sender.layer_done(2, now=0.0)
    sender.layer_done(4, now=0.0)
    early, late = (write.write_id for write in posts(sender))
    sender.send(Send(ID, 0, ids(5, 6)), now=0.0)
    second = posts(sender)[0].write_id

    sender.written(LINK, late, now=0.0)
    sender.report_progress()
    sender.written(LINK, early, now=0.0)
    sender.report_progress()

    assert second not in (early, late)
    assert sent_messages(sender) == [Writing(ID, num_written=0), Writing(ID, num_written=1)]


def test_progress_reports_blocks_written_during_the_prefill_once() -> None:
    """Decode can process those blocks while the next are computed or in flight."""
    sender = pushing()

    sender.report_progress()
    sender.report_progress()
    under_way = sent_messages(sender)
    sender.written(LINK, 1, 0.1)
    sender.report_progress()

    assert under_way == [Writing(ID, num_written=0)]
    assert sent_messages(sender) == [Writing(ID, num_written=2)]


def test_the_decode_node_is_notified_when_the_last_write_is_in_flight() -> None:
    sender = pushing()
    sender.report_progress()
    sent_messages(sender)

    sender.complete(complete(), 0.1)
    sender.report_progress()
    sender.report_progress()

    assert sent_messages(sender) == [Writing(ID, num_written=0)]


def test_a_send_that_completes_at_once_sends_only_done() -> None:
    sender = linked()
    sender.handle_message(LINK, grant(7), 0.0)
    sender.send(Send(ID, 0, ids(1)), 0.0)
    sender.complete(complete(), 0.0)

    sender.written(LINK, 1, 0.0)
    sender.report_progress()

    assert sent_messages(sender) == []


def test_layers_wait_for_earlier_blocks_beyond_the_limit_in_flight() -> None:
    sender = Sender(BLOCK_BYTES, replace(CONFIG, max_in_flight_bytes=12), num_layers=4)
    sender.link_up(LINK)
    sender.send(Send(ID, 0, ids(1, 2)), now=0.0)
    sender.send_layers(Send(ID, 2, ids(3)), now=0.0)
    sender.handle_message(LINK, grant(7, 8, 9), now=0.0)
    first = posts(sender)[0]

    sender.layer_done(1, now=0.0)
    while_full = parts(sender)
    sender.written(LINK, first.write_id, now=0.0)

    assert while_full == []
    assert parts(sender) == [(ids(8), WHOLE_BLOCK), (ids(9), LayerRange(0, 1, 4))]


NAMES = (b"first", b"second")


def requested() -> Sender:
    """Return a sender with a pull of two blocks since second 0, which was reported."""
    sender = linked()
    sender.handle_message(LINK, pull_grant(), 0.0)
    assert sender.take_requested() == (Requested(ID, NAMES),)
    return sender


def pull_grant(ticket: int = 1) -> Grant:
    return replace(grant(7, 8, ticket=ticket), names=NAMES)


def give(sender: Sender, now: float = 0.1) -> None:
    sender.send(Send(ID, 0, ids(1, 2)), now)
    sender.complete(Complete(ID, 8, None), now)


def test_a_pull_is_requested_once_and_its_blocks_are_sent_like_those_of_a_hand_off() -> None:
    sender = requested()
    sender.handle_message(LINK, pull_grant(ticket=2), 0.0)
    assert sent_messages(sender) == [Failed(ID, "the id is in use: it is no pull")]
    give(sender)

    assert posts(sender) == [Write(1, 1, 0, ids(1, 2), ids(7, 8))]
    sender.written(LINK, 1, 0.2)

    assert SendDone(LINK, 1, Complete(ID, 8, None)) in sender.take_actions()
    assert sender.take_finished() == (ID,)
    assert sender.take_requested() == ()


def test_a_grant_without_names_requests_nothing_and_is_reported_once() -> None:
    sender = linked()
    sender.handle_message(LINK, grant(7, 8), 0.0)
    assert sender.take_requested() == ()
    assert [sender.take_granted() for _ in range(2)] == [(ID,), ()]


def test_grants_that_are_refused_and_those_of_pulls_are_not_reported() -> None:
    sender = requested()
    sender.withdraw(Withdraw(HandoffId("ended", 0), "abort"), 0.0)
    sender.handle_message(LINK, grant(7, ticket=2, handoff_id=HandoffId("ended", 0)), 0.0)
    sender.handle_message(LINK, grant(7, ticket=3), 0.0)
    assert sender.take_granted() == ()


def test_a_pull_with_the_id_of_a_hand_off_is_refused() -> None:
    sender = linked()
    sender.send(Send(ID, 0, ids(1, 2)), 0.0)

    sender.handle_message(LINK, pull_grant(), 0.0)

    assert sent_messages(sender) == [Failed(ID, "the id is in use: it is no pull")]
    assert sender.take_requested() == ()


def test_a_refused_pull_fails_at_once_and_ends() -> None:
    sender = requested()

    sender.withdraw(Withdraw(ID, "not cached"), 0.1)

    assert sent_messages(sender) == [Failed(ID, "not cached")]
    assert sender.take_finished() == (ID,)
    assert not list(sender.outgoing())


@pytest.mark.parametrize("how", ["revoked", "cut", "expired"])
def test_orders_for_a_finished_pull_write_nothing_and_end_once(how: str) -> None:
    sender = requested()
    if how == "revoked":
        sender.handle_message(LINK, RevokeGrant(ID, 1), 0.1)
        assert sent_messages(sender) == [Revoked(ID)]
    elif how == "cut":
        sender.handle_link_cut(LINK, "the link broke")
    else:
        sender.tick(3.0)
        assert sent_messages(sender) == [Failed(ID, "the lease ended")]
    assert sender.take_finished() == ()

    give(sender, 3.1)

    assert posts(sender) == []
    assert sender.take_finished() == (ID,)
    assert not list(sender.outgoing())
