"""KV worker with its peers, over the in-memory transport."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.core.ids import HandoffId, Incarnation, NodeId
from baton.kv_transfer.layout import KvPacking
from baton.kv_transfer.pairs import MAX_LINKS_WITHOUT_HELLO, Identity
from baton.kv_transfer.process_identity import ProcessIdentity, current_process_mark
from baton.kv_transfer.protocol.messages import WIRE_VERSION, Fingerprint, Hello, find_mismatch
from baton.kv_transfer.records import TransferRole
from baton.kv_transfer.worker import KvTransferWorker
from tests.support.handoff_world import CONFIG, FINGERPRINT, Node, World
from tests.support.lagging_memory import Memory
from tests.support.memory_transport import Flight, MemoryTransport, Wire

ID, NEXT_ID = HandoffId("r", 0), HandoffId("r", 1)


def half_sent(world: World) -> None:
    """Begin a hand-off of four blocks whose writes are posted but have not landed."""
    world.receive(ID, "p0", 0, 4)
    world.begin(ID, "p0", 4)
    exchange_messages(world)
    world.complete(ID)
    exchange_messages(world)
    assert world.wire.flights


def exchange_messages(world: World) -> None:
    for _ in range(4):
        for node in world.nodes:
            if not node.is_stopped:
                node.link.pass_all()
        world.turn_all()


def test_a_hand_off_lands_and_is_recorded_on_both_sides() -> None:
    world = World()
    half_sent(world)

    world.settle()

    world.check_all_free()
    assert world.landed == {ID}
    [sent], [received] = world.ps["p0"].worker.take_records(), world.d.worker.take_records()
    assert (sent.outcome, sent.num_blocks, sent.num_bytes, sent.num_writes) == (
        "announced", 4, 32, 2,
    )  # fmt: skip
    assert (received.outcome, received.num_bytes) == ("done", 32)


def test_nodes_pull_from_each_other_over_a_link_for_each_direction() -> None:
    world = World()
    p = world.ps["p0"]
    world.cache(p, b"of p")
    world.cache(world.d, b"of d")

    there = world.pull(world.d, "p0", (b"of p",))
    back = world.pull(p, "d", (b"of d",))
    world.settle()

    assert world.landed == {there, back}
    assert world.d.cached.keys() == p.cached.keys() == {b"of p", b"of d"}
    for node in (world.d, p):
        assert [each.worker.counters().num_cut_pairs for each in world.nodes] == [0, 0, 0]
        records = sorted((each.role.value, each.outcome) for each in node.worker.take_records())
        assert records == [("given", "announced"), ("pulled", "done")]
    world.check_all_free()


def test_a_corrupted_byte_is_a_lost_pull_if_digests_are_verified() -> None:
    world = World(config=replace(CONFIG, verify=True))
    world.cache(world.ps["p0"], b"cached")
    handoff_id = world.pull(world.d, "p0", (b"cached",))
    assert handoff_id is not None
    exchange_messages(world)
    world.answer_pull(world.ps["p0"])
    [flight] = world.wire.flights
    world.wire.land(flight, 0)
    world.d.memory.put(flight.write.targets[0], b"garbage!")

    world.settle()

    assert handoff_id not in world.landed
    assert world.d.worker.counters().num_digest_mismatches == 1
    world.check_all_free()


def test_a_pull_of_evicted_blocks_is_refused_and_its_blocks_are_released() -> None:
    world = World()

    world.pull(world.d, "p0", (b"gone",))
    world.settle()

    [record] = world.d.worker.take_records()
    assert (record.role, record.outcome) == (TransferRole.PULLED, "the peer: not cached")
    world.check_all_free()


def test_the_first_hand_off_of_a_warmed_up_pair_uses_the_existing_link() -> None:
    world = World()
    world.d.worker.connect("p0", world.now)
    exchange_messages(world)
    num_linked = world.d.worker.counters().num_linked_peers

    half_sent(world)
    world.settle()

    assert num_linked == world.d.worker.counters().num_linked_peers == 1
    assert world.ps["p0"].worker.counters().num_cut_pairs == 0
    assert world.landed == {ID}


def test_links_to_nodes_that_do_not_answer_are_bounded() -> None:
    world = World()

    for number in range(400):
        world.d.worker.connect(f"dead-{number}", world.now)
    world.turn_all()

    assert world.d.worker.counters().num_linking_peers == MAX_LINKS_WITHOUT_HELLO


def test_blocks_written_before_prefill_ended_are_the_overlap() -> None:
    world = World()
    world.receive(ID, "p0", 0, 4)
    world.begin(ID, "p0", 4)
    world.send(ID, 3)
    world.exchange()

    world.complete(ID)
    world.settle()

    assert world.ps["p0"].worker.take_records()[0].overlap == 0.75


def test_a_corrupted_byte_is_a_lost_hand_off_if_digests_are_verified() -> None:
    world = World(config=replace(CONFIG, verify=True))
    half_sent(world)
    flight = world.wire.flights[0]
    for place in list(flight.missing):
        world.wire.land(flight, place)
    world.d.memory.put(flight.write.targets[0], b"garbage!")

    world.settle()

    assert world.landed == set()
    assert ID in world.ended
    assert world.d.worker.counters().num_digest_mismatches == 1


@pytest.mark.parametrize("is_revoked", [False, True])
@pytest.mark.parametrize(("is_spoilt", "num_proved"), [(False, 2), (True, 0)])
def test_leading_blocks_of_a_lost_hand_off_are_kept_if_their_digest_matches(
    is_spoilt: bool, num_proved: int, is_revoked: bool
) -> None:
    world = World(config=replace(CONFIG, verify=True))
    half_sent(world)
    first, _ = world.wire.flights
    for place in list(first.missing):
        world.wire.land(first, place)
    if is_spoilt:
        world.d.memory.put(first.write.targets[0], b"garbage!")
    world.wire.acknowledge(first)
    exchange_messages(world)

    if is_revoked:
        world.revoke(ID)
    world.kill_p("p0")
    exchange_messages(world)

    assert ID in world.ended
    assert world.num_proved == num_proved
    world.settle()
    world.check_all_free()


def test_blocks_of_a_stalled_peer_are_released_once_the_local_end_is_closed() -> None:
    world = World()
    half_sent(world)
    world.ps["p0"].is_stopped = True

    world.now += CONFIG.receiver.silence_s
    world.turn(world.d)

    assert ID in world.ended
    world.wire.deliver_all()  # too late: the simulation would raise
    world.settle()
    world.check_all_free()


def test_blocks_of_a_stalled_peer_with_direct_access_stay_fenced_until_it_responds() -> None:
    world = World(wire=Wire(is_direct=True))
    half_sent(world)
    world.ps["p0"].is_stopped = True

    for _ in range(30):
        world.now += 1.0
        exchange_messages(world)
    fenced = world.d.worker.counters().num_fenced_blocks
    world.ps["p0"].is_stopped = False
    exchange_messages(world)

    assert fenced == 4
    assert ID in world.ended
    assert world.d.worker.counters().num_fenced_blocks == 0


def test_the_fence_of_a_dead_peer_ends_without_reconnecting() -> None:
    world = World(wire=Wire(is_direct=True))
    half_sent(world)

    world.kill_p("p0")
    exchange_messages(world)
    world.now += CONFIG.tick_s
    world.turn(world.d)

    assert ID in world.ended
    assert world.d.worker.counters().num_fenced_blocks == 0


def test_a_second_process_with_the_same_node_id_does_not_end_fences_of_the_first() -> None:
    world = World(wire=Wire(is_direct=True))
    half_sent(world)

    world.double_p("p0")
    for _ in range(30):
        world.now += 1.0
        exchange_messages(world)
    fenced = world.d.worker.counters().num_fenced_blocks
    for flight in list(world.wire.flights):
        world.wire.land(flight, flight.missing[0])  # in a block of a new owner, it would raise
    world.kill_doubles()
    world.settle()

    assert fenced == 4
    world.check_all_free()


def test_a_second_process_with_the_same_node_id_is_refused_until_the_first_has_ended() -> None:
    world = World(wire=Wire(is_direct=True))
    half_sent(world)
    world.double_p("p0")
    exchange_messages(world)

    world.receive(NEXT_ID, "p0", 0, 2)
    exchange_messages(world)
    [first, second] = world.d.worker.take_records()
    world.kill_doubles()
    world.settle()
    third = HandoffId("r", 2)
    world.receive(third, "p0", 0, 2)
    world.begin(third, "p0", 2)
    world.complete(third)
    world.settle()

    assert first.handoff_id == ID
    assert second.outcome.startswith("DuplicateNodeId: two processes have the node id p0")
    assert world.landed == {third}
    world.check_all_free()


def test_a_second_decode_node_with_the_same_id_is_refused_and_the_first_keeps_its_link() -> None:
    world = World()
    half_sent(world)
    double = Node(world, "d", 4, CONFIG)

    double.worker.connect("p0", world.now)
    for _ in range(4):
        double.link.pass_all()
        exchange_messages(world)
        double.worker.poll(world.now)
    world.settle()

    assert world.landed == {ID}
    assert double.worker.counters().num_linked_peers == 0
    assert double.worker.counters().num_cut_pairs == 1
    world.check_all_free()


def test_a_peer_that_does_not_answer_the_hello_is_dialled_again() -> None:
    world = World(wire=Wire(is_direct=True))
    half_sent(world)
    world.hub.cut(world.hub.link_ids[0])
    exchange_messages(world)
    world.now += CONFIG.redial_s
    world.turn(world.d)
    world.ps["p0"].link.queued.clear()  # our Hello among them

    for _ in range(10):
        world.now += 1.0
        exchange_messages(world)

    assert ID in world.ended


def test_a_pair_dialled_for_a_fence_is_used_by_the_next_hand_off() -> None:
    world = World(wire=Wire(is_direct=True))
    half_sent(world)
    world.hub.cut(world.hub.link_ids[0])
    exchange_messages(world)
    world.now += CONFIG.redial_s
    exchange_messages(world)

    world.receive(NEXT_ID, "p0", 0, 2)
    world.begin(NEXT_ID, "p0", 2)
    world.complete(NEXT_ID)
    world.exchange()

    assert NEXT_ID in world.landed


def test_a_new_connection_of_a_peer_closes_its_older_pair_first() -> None:
    """The answer frees blocks on the other side, so writes of the older pair must have ended."""
    world = World(wire=Wire(is_direct=True))
    half_sent(world)
    p = world.ps["p0"].link
    world.hub.cut(world.hub.link_ids[0])
    world.d.link.pass_all()
    world.turn(world.d)
    p.queued = [one for one in p.queued if not isinstance(one.content, str)]
    world.now += CONFIG.redial_s
    world.turn(world.d)

    exchange_messages(world)

    assert ID in world.ended
    world.wire.deliver_all()  # too late: the simulation would raise


def pass_in_a_long_layer(world: World, busy: Node, seconds: int) -> None:
    """Advance the time while the node's engine thread is in a layer."""
    for _ in range(seconds):
        world.now += 1.0
        for node in world.nodes:
            node.link.pass_all()
            if node is busy:
                node.worker.inbox.pulse()
            else:
                world.turn(node)


def test_a_prefill_node_in_a_layer_longer_than_the_silence_limit_is_not_cut_off() -> None:
    world = World()
    half_sent(world)

    pass_in_a_long_layer(world, world.ps["p0"], seconds=int(3 * CONFIG.receiver.silence_s))
    fenced_or_cut = world.d.worker.counters().num_cut_pairs
    world.settle()

    assert fenced_or_cut == 0
    assert world.landed == {ID}


def test_a_decode_node_in_a_layer_longer_than_its_leases_keeps_them() -> None:
    world = World()
    half_sent(world)
    world.wire.acknowledge(landed_whole(world))

    pass_in_a_long_layer(world, world.d, seconds=int(3 * CONFIG.receiver.lease_s))
    world.settle()

    assert world.landed == {ID}


def test_peers_can_connect_during_a_layer_longer_than_the_silence_limit() -> None:
    patient = replace(CONFIG.receiver, fence_age_s=60)
    world = World(config=replace(CONFIG, receiver=patient))
    world.receive(ID, "p0", 0, 4)
    world.begin(ID, "p0", 4)
    world.complete(ID)

    pass_in_a_long_layer(world, world.ps["p0"], seconds=int(2 * CONFIG.receiver.silence_s))
    num_linked = world.d.worker.counters().num_linked_peers
    world.settle()

    assert num_linked == 0
    assert world.landed == {ID}
    assert world.d.worker.counters().num_cut_pairs == 0


def test_a_node_suspended_while_connecting_times_out() -> None:
    world = World()
    world.receive(ID, "p0", 0, 4)
    world.ps["p0"].is_stopped = True

    for _ in range(int(CONFIG.receiver.silence_s) + 1):
        world.now += 1.0
        world.d.link.pass_all()
        world.turn(world.d)

    assert ID in world.ended
    assert world.d.worker.counters().num_cut_pairs == 1


def landed_whole(world: World) -> Flight:
    flight = world.wire.flights[0]
    for place in list(flight.missing):
        world.wire.land(flight, place)
    return flight


@pytest.mark.parametrize("busy", ["d", "p0"])
def test_keepalives_stop_if_the_engine_is_stuck(busy: str) -> None:
    world = World(config=replace(CONFIG, busy_s=8))
    half_sent(world)

    node = world.d if busy == "d" else world.ps[busy]
    limits = CONFIG.receiver
    limit_s = limits.lease_s if busy == "d" else limits.silence_s
    pass_in_a_long_layer(world, node, seconds=8 + int(limit_s) + 1)
    world.settle()

    assert world.landed == set()
    world.check_all_free()


def test_an_unreadable_notification_closes_the_pair() -> None:
    world = World()
    half_sent(world)
    for flight in list(world.wire.flights):
        for place in list(flight.missing):
            world.wire.land(flight, place)
        world.wire.acknowledge(flight)
    world.turn(world.ps["p0"])
    [(channel, ticket, note)] = world.wire.notices
    world.wire.notices = [(channel, ticket, note[:-1])]

    world.exchange()
    world.settle()

    assert world.landed == set()
    assert world.d.worker.counters().num_cut_pairs == 1
    world.check_all_free()


def other_layout(**changes: Any) -> Fingerprint:
    return replace(FINGERPRINT, layout=replace(FINGERPRINT.layout, **changes))


def test_incompatible_peers_are_refused_by_name() -> None:
    world = World()
    other = other_layout(dtype="bfloat16")
    memory = Memory(8)
    link = world.hub.link("stranger")
    worker = KvTransferWorker(
        Identity(NodeId("stranger"), Incarnation("s/1"), other),
        memory.region,
        MemoryTransport(memory.region, world.wire),
        link,
        CONFIG,
    )
    link.events = worker.inbox
    world.receive(ID, "stranger", 0, 2)

    for _ in range(4):
        worker.poll(world.now)
        world.d.link.pass_all()
        world.turn(world.d)

    assert ID in world.ended
    assert "dtype differs" in world.d.worker.take_records()[0].outcome
    assert worker.counters().num_linked_peers == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            # Blocks that hold two of ours each: refused, though they could be taken apart.
            {
                "fingerprint": replace(
                    FINGERPRINT, layout=replace(FINGERPRINT.layout, block_size=32)
                )
            },
            "block_size differs: 16 and 32 on a and b; give all nodes one block-size",
        ),
        (
            {
                "fingerprint": replace(
                    FINGERPRINT,
                    layout=replace(
                        FINGERPRINT.layout, num_layers=FINGERPRINT.layout.num_layers + 1
                    ),
                )
            },
            (
                f"num_layers differs: {FINGERPRINT.layout.num_layers} and "
                f"{FINGERPRINT.layout.num_layers + 1} on a and b; serve one model from all nodes, "
                "with one --speculative: a draft head adds a layer"
            ),
        ),
        (
            {"fingerprint": replace(FINGERPRINT, wire_version=1)},
            (
                f"wire_version differs: {WIRE_VERSION} and 1 on a and b; "
                "run one version of baton on all nodes"
            ),
        ),
        (
            {
                "fingerprint": replace(
                    FINGERPRINT, layout=replace(FINGERPRINT.layout, packing=KvPacking.INT8)
                )
            },
            (
                "dtype differs: float32 and int8/float32 on a and b; "
                "give all nodes one --dtype and --kv-cache-dtype"
            ),
        ),
        (
            {"transport": "ucxx"},
            "transport differs: memory and ucxx on a and b; give all nodes one --kv-transport",
        ),
        (
            {"region": replace(Memory(1).region, block_bytes=16)},
            "block_bytes differs: 8 and 16 on a and b; serve one model from all nodes",
        ),
        ({}, None),
    ],
)
def test_a_mismatch_between_peers_is_reported_with_the_remedy(
    change: dict[str, object], reason: str | None
) -> None:
    region = Memory(1).region
    ours = Hello(NodeId("a"), Incarnation("1"), FINGERPRINT, region, "memory", b"")
    theirs = replace(replace(ours, node_id=NodeId("b")), **change)  # type: ignore[arg-type]

    refusal = find_mismatch(ours, theirs)

    assert refusal == reason


def test_a_receive_from_an_unreachable_peer_is_lost_and_releases_its_blocks() -> None:
    world = World()
    world.hub.remove("p0")

    world.receive(ID, "p0", 0, 4)
    world.turn(world.d)
    world.d.link.pass_all()
    world.turn(world.d)

    assert ID in world.ended
    assert sorted(world.d.free) == list(range(8))


def test_only_a_busy_worker_requests_frequent_polls() -> None:
    world = World()
    idle = world.d.worker.next_poll_s(world.now)
    half_sent(world)

    busy = [world.d.worker.next_poll_s(world.now), world.ps["p0"].worker.next_poll_s(world.now)]
    world.now += CONFIG.burst_s
    later = [world.d.worker.next_poll_s(world.now), world.ps["p0"].worker.next_poll_s(world.now)]
    world.settle()
    world.now += CONFIG.linger_s

    assert idle is None
    assert busy == [CONFIG.burst_poll_s, CONFIG.burst_poll_s]
    assert later == [CONFIG.poll_s, CONFIG.poll_s]
    assert [node.worker.next_poll_s(world.now) for node in world.nodes] == [None, None, None]


def test_hand_offs_without_writes_are_polled_for_their_deadlines() -> None:
    world = World()
    world.receive(ID, "p0", 0, 4)  # the link is not up yet
    world.begin(ID, "p0", 4)
    world.complete(ID)  # held for the grant

    delays = [world.d.worker.next_poll_s(world.now), world.ps["p0"].worker.next_poll_s(world.now)]

    assert delays == [CONFIG.tick_s, CONFIG.tick_s]


@pytest.mark.parametrize("is_direct", [False, True])
def test_closing_a_node_notifies_its_peers(is_direct: bool) -> None:
    world = World(wire=Wire(is_direct=is_direct))
    half_sent(world)

    with world.ps["p0"].worker:
        pass  # the node shuts down cleanly
    world.d.link.pass_all()
    world.turn(world.d)

    assert ID in world.ended
    assert world.d.worker.counters().num_linked_peers == 0


def test_a_process_identity_detects_that_a_process_has_ended() -> None:
    mark = current_process_mark()
    reused = replace(mark, start_ticks="1")

    assert ProcessIdentity.from_bytes(mark.to_bytes()) == mark
    assert not mark.is_gone()
    assert reused.is_gone()
    assert not mark.is_near(replace(mark, realm="elsewhere"))
