"""Receiver of the KV protocol (decode), event by event."""

from __future__ import annotations

from dataclasses import replace

from baton.core.ids import BlockId, HandoffId, NodeId, Peer
from baton.core.output import FirstToken
from baton.kv_transfer.config import ReceiverConfig
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.actions import (
    BreakLink,
    CancelWrites,
    CheckDigest,
    DigestBlocks,
    ExpectWrites,
    SendMessage,
)
from baton.kv_transfer.protocol.messages import (
    Done,
    Failed,
    Grant,
    LinkMessage,
    Renew,
    Renewed,
    Revoked,
    RevokeGrant,
    Writing,
)
from baton.kv_transfer.protocol.receiver import Receiver
from baton.kv_transfer.types import Landed, Lost, Receive

LINK, OTHER_LINK = LinkId(1), LinkId(2)
ID = HandoffId("r", 0)
BLOCKS = (BlockId(3), BlockId(5))
CONFIG = ReceiverConfig(lease_s=3, silence_s=7, fence_age_s=5, give_up_s=60)
FIRST = FirstToken(9)


def order(handoff_id: HandoffId = ID, block_ids: tuple[BlockId, ...] = BLOCKS) -> Receive:
    return Receive(handoff_id, Peer(NodeId("p"), "p:1"), 0, block_ids, 20)


def done(handoff_id: HandoffId = ID, digest: int | None = None) -> Done:
    return Done(handoff_id, 20, FIRST, digest)


def granted(*, is_one_sided: bool = True, handoff_id: HandoffId = ID) -> Receiver:
    """Return a receiver that sent one grant at second 0."""
    receiver = Receiver(CONFIG, is_one_sided=is_one_sided)
    receiver.receive(order(handoff_id), LINK, 0.0)
    receiver.link_up(LINK, 0.0)
    receiver.take_actions()
    return receiver


def sent_messages(receiver: Receiver) -> list[LinkMessage]:
    return [action.message for action in receiver.take_actions() if isinstance(action, SendMessage)]


def test_a_grant_is_sent_once_the_link_is_up_and_writes_are_expected() -> None:
    receiver = Receiver(CONFIG, is_one_sided=True)
    receiver.receive(order(), LINK, 0.0)
    before = receiver.take_actions()

    receiver.link_up(LINK, 0.5)

    assert before == []
    grant = Grant(ID, 1, 0, BLOCKS, 3)
    assert receiver.take_actions() == [ExpectWrites(LINK, 1, BLOCKS), SendMessage(LINK, grant)]


def test_the_grant_of_a_pull_names_its_blocks() -> None:
    receiver = Receiver(CONFIG, is_one_sided=True)
    receiver.link_up(LINK, 0.0)

    receiver.receive(replace(order(), names=(b"a", b"b")), LINK, 0.0)

    assert sent_messages(receiver) == [Grant(ID, 1, 0, BLOCKS, 3, (b"a", b"b"))]


def test_a_link_that_was_up_before_its_first_receive_grants_at_once() -> None:
    receiver = Receiver(CONFIG, is_one_sided=True)
    receiver.link_up(LINK, 0.0)

    receiver.receive(order(), LINK, 1.0)

    assert [type(message) for message in sent_messages(receiver)] == [Grant]


def test_a_receive_lands_only_after_done_and_the_arrival_of_its_data() -> None:
    receiver = granted()

    receiver.handle_message(LINK, done(), 1.0)
    after_done = receiver.take_reports().finished_recving
    receiver.arrived(LINK, 1)

    assert after_done == ()
    assert receiver.take_reports().finished_recving == (Landed(ID, 20, FIRST),)


def test_data_that_arrives_before_done_does_not_land_by_itself() -> None:
    receiver = granted()

    receiver.arrived(LINK, 1)
    after_arrival = receiver.take_reports().finished_recving
    receiver.handle_message(LINK, done(), 1.0)

    assert after_arrival == ()
    assert receiver.take_reports().finished_recving == (Landed(ID, 20, FIRST),)


def test_done_attached_to_the_data_lands_the_receive_once() -> None:
    receiver = granted()

    receiver.arrived(LINK, 1, done())
    landed = receiver.take_reports().finished_recving
    receiver.arrived(LINK, 1, done())
    receiver.handle_message(LINK, done(), 1.0)

    assert landed == (Landed(ID, 20, FIRST),)
    assert receiver.take_reports().finished_recving == ()
    assert receiver.num_dropped == 2


def test_done_attached_to_the_data_of_another_hand_off_lands_nothing() -> None:
    receiver = granted()

    receiver.arrived(LINK, 1, done(HandoffId("r", 1)))
    receiver.arrived(OTHER_LINK, 1, done())
    receiver.arrived(LINK, 2, done())

    assert receiver.take_reports().finished_recving == ()
    assert receiver.num_dropped == 3


def test_done_attached_to_the_data_after_a_revoke_lands_nothing() -> None:
    receiver = granted()
    receiver.revoke(ID, 0.5)

    receiver.arrived(LINK, 1, done())
    reports = receiver.take_reports()
    receiver.handle_message(LINK, Revoked(ID), 1.0)

    assert (reports.finished_recving, reports.released) == ((), ())
    assert receiver.take_reports().released == (ID,)


def test_a_writing_message_that_arrives_after_its_data_is_not_counted_as_dropped() -> None:
    receiver = granted()
    receiver.arrived(LINK, 1, done())

    receiver.handle_message(LINK, Writing(ID), 1.0)

    assert receiver.num_dropped == 0


def test_messages_of_another_link_or_attempt_are_dropped() -> None:
    receiver = granted()
    receiver.link_up(OTHER_LINK, 0.0)
    receiver.arrived(LINK, 1)

    receiver.handle_message(OTHER_LINK, done(), 1.0)
    receiver.handle_message(LINK, done(HandoffId("r", 1)), 1.0)
    receiver.arrived(OTHER_LINK, 1)

    assert receiver.take_reports().finished_recving == ()
    assert receiver.num_dropped == 3


def test_a_revoked_receive_keeps_its_blocks_until_the_sender_confirms() -> None:
    receiver = granted()

    receiver.revoke(ID, 1.0)
    requested = receiver.take_actions()
    receiver.handle_message(LINK, done(), 1.1)
    receiver.arrived(LINK, 1)
    before = receiver.take_reports()
    receiver.handle_message(LINK, Revoked(ID), 1.2)

    assert requested == [CancelWrites(LINK, 1), SendMessage(LINK, RevokeGrant(ID, 1))]
    assert (before.finished_recving, before.released) == ((), ())
    assert receiver.take_reports().released == (ID,)


def test_revoked_is_ignored_for_a_grant_that_was_not_revoked() -> None:
    receiver = granted()

    receiver.handle_message(LINK, Revoked(ID), 1.0)

    assert receiver.take_reports().released == ()
    assert receiver.num_dropped == 1


def test_with_two_sided_transports_only_the_end_of_a_receive_releases_its_blocks() -> None:
    receiver = granted(is_one_sided=False)
    receiver.revoke(ID, 1.0)

    receiver.handle_message(LINK, Revoked(ID), 1.2)
    before = receiver.take_reports().released
    receiver.handle_cancel_completed(LINK, 1)

    assert before == ()
    assert receiver.take_reports().released == (ID,)


def test_a_failed_receive_is_lost_at_once_revoked_and_released_later() -> None:
    receiver = granted()

    receiver.handle_message(LINK, Failed(ID, "no room"), 1.0)

    reports = receiver.take_reports()
    assert reports.failed_recving == (Lost(ID, "the peer: no room"),)
    assert reports.released == ()
    assert sent_messages(receiver) == [RevokeGrant(ID, 1)]


def test_a_receive_that_was_revoked_is_not_reported_as_lost() -> None:
    receiver = granted()
    receiver.handle_message(LINK, Failed(ID, "no room"), 1.0)

    receiver.revoke(ID, 1.1)

    assert receiver.take_reports().failed_recving == ()


def test_a_revoke_before_the_link_is_up_releases_at_once() -> None:
    receiver = Receiver(CONFIG, is_one_sided=True)
    receiver.receive(order(), LINK, 0.0)

    receiver.revoke(ID, 0.1)
    receiver.link_up(LINK, 0.2)

    assert receiver.take_reports().released == (ID,)
    assert sent_messages(receiver) == []


def test_a_grant_is_renewed_at_a_third_of_its_lease() -> None:
    receiver = granted()

    said_by_s = {}
    for now in (0.9, 1.0, 1.9, 2.0):
        receiver.tick(now)
        said_by_s[now] = sent_messages(receiver)

    renew = Renew((ID,), 3)
    assert said_by_s == {0.9: [], 1.0: [renew], 1.9: [], 2.0: [renew]}


def test_keepalives_are_requested_while_blocks_are_fenced() -> None:
    receiver = granted()
    receiver.revoke(ID, 0.5)
    receiver.take_actions()

    receiver.tick(1.0)

    assert sent_messages(receiver) == [Renew((), 3)]


def test_three_unanswered_keepalives_precede_a_timeout_regardless_of_the_lease() -> None:
    config = ReceiverConfig(lease_s=600, silence_s=6)

    assert config.renew_every_s == 2


def test_a_silent_peer_closes_the_pair_and_a_responsive_peer_does_not() -> None:
    silent, answering = granted(), granted()
    answering.handle_message(LINK, Renewed((ID,)), 5.0)

    silent.tick(7.0)
    answering.tick(7.0)

    assert any(isinstance(action, BreakLink) for action in silent.take_actions())
    assert not any(isinstance(action, BreakLink) for action in answering.take_actions())


def test_a_link_that_does_not_come_up_times_out() -> None:
    receiver = Receiver(CONFIG, is_one_sided=True)
    receiver.receive(order(), LINK, 0.0)

    receiver.tick(7.0)

    assert any(isinstance(action, BreakLink) for action in receiver.take_actions())


def test_complete_blocks_are_digested_while_others_arrive_unless_they_are_fenced() -> None:
    receiver = granted(is_one_sided=False)

    receiver.landing(LINK, 1, 1)
    receiver.landing(LINK, 1, 1)
    early = [one for one in receiver.take_actions() if isinstance(one, DigestBlocks)]
    receiver.revoke(ID, 0.5)
    receiver.landing(LINK, 1, 2)
    fenced = [one for one in receiver.take_actions() if isinstance(one, DigestBlocks)]

    assert early == [DigestBlocks(ID, order().block_ids[:1])]
    assert fenced == []


def test_an_unanswered_hello_closes_the_pair_despite_keepalives() -> None:
    config = ReceiverConfig(lease_s=3, silence_s=7, fence_age_s=12)
    receiver = Receiver(config, is_one_sided=True)
    receiver.receive(order(), LINK, 0.0)
    broken = []

    for now in range(1, 13):
        receiver.handle_message(LINK, Renewed(()), float(now))
        receiver.tick(float(now))
        broken += [now for one in receiver.take_actions() if isinstance(one, BreakLink)]

    assert broken == [12]


def test_an_unanswered_revoke_closes_the_pair_despite_other_messages() -> None:
    receiver = granted()
    receiver.revoke(ID, 0.0)
    receiver.take_actions()
    receiver.handle_message(LINK, Renewed(()), 4.9)

    receiver.tick(5.0)

    assert any(isinstance(action, BreakLink) for action in receiver.take_actions())
    assert receiver.take_reports().released == ()


def test_a_receive_that_never_ends_times_out_despite_keepalives() -> None:
    receiver = granted()
    receiver.handle_message(LINK, Renewed((ID,)), 59.0)

    receiver.tick(60.0)

    assert receiver.take_reports().failed_recving == (Lost(ID, "gave up after 60 s"),)


def test_a_link_cut_that_stops_writes_releases_the_blocks_at_once() -> None:
    receiver = granted()

    receiver.handle_link_cut(LINK, "gone", 1.0, writes_stopped=True)

    reports = receiver.take_reports()
    assert reports.failed_recving == (Lost(ID, "gone"),)
    assert reports.released == (ID,)


def test_a_link_cut_keeps_the_fence_if_the_peer_can_still_write() -> None:
    receiver = granted()
    receiver.handle_peer_cut(LINK)

    receiver.handle_link_cut(LINK, "gone", 1.0, writes_stopped=False)
    before = receiver.take_reports().released
    receiver.tick(1000.0)
    receiver.handle_message(LINK, Revoked(ID), 1000.0)
    much_later = receiver.take_reports().released
    receiver.handle_peer_cut(LINK)

    assert (before, much_later) == ((), ())
    assert receiver.take_reports().released == (ID,)


def test_a_wrong_digest_after_all_data_arrived_is_a_loss_without_fence() -> None:
    receiver = granted()
    receiver.arrived(LINK, 1)
    receiver.handle_message(LINK, done(digest=77), 1.0)
    requested = receiver.take_actions()

    receiver.checked(ID, is_good=False)

    assert requested == [CheckDigest(ID, BLOCKS, 77)]
    reports = receiver.take_reports()
    assert reports.finished_recving == ()
    assert [lost.handoff_id for lost in reports.failed_recving] == [ID]
    assert reports.released == (ID,)


def test_each_receive_is_reported_once() -> None:
    receiver = granted()
    receiver.revoke(ID, 1.0)
    receiver.handle_message(LINK, Revoked(ID), 1.1)
    first = receiver.take_reports().released

    receiver.handle_message(LINK, Revoked(ID), 1.2)
    receiver.revoke(ID, 1.3)
    receiver.handle_link_cut(LINK, "gone", 1.4, writes_stopped=True)

    assert first == (ID,)
    assert receiver.take_reports().released == ()
    assert list(receiver.incoming()) == []


def test_each_landed_block_is_digested_once_while_others_are_in_flight() -> None:
    receiver = granted()
    receiver.take_actions()

    for num_written in (0, 1, 1):
        receiver.handle_message(LINK, Writing(ID, num_written), 0.0)
    receiver.handle_message(LINK, done(digest=5), 0.0)
    receiver.arrived(LINK, 1)

    assert receiver.take_actions() == [
        DigestBlocks(ID, BLOCKS[:1]),
        CheckDigest(ID, BLOCKS[1:], 5),
    ]


def test_two_sided_transports_ignore_writing_messages() -> None:
    receiver = granted(is_one_sided=False)
    receiver.take_actions()

    receiver.handle_message(LINK, Writing(ID, 1), 0.0)

    assert receiver.take_actions() == []
