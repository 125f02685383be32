"""Publisher of KV events, with real sockets."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from baton.core.errors import InvalidConfig
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.node.kv.events.config import KvEventsConfig
from baton.node.kv.events.messages import CacheFacts
from baton.node.kv.events.publisher import KvEventPublisher
from tests.support.ports import free_port
from tests.support.waits import await_value, reaches
from tools.follow_kv_events import KvEventFollower

FACTS = CacheFacts(1, lambda _: BlockHash(b"u" * 16), "full_attention")
PATIENCE_MS = 30_000
MAX_TRIES = 1000

MakeConfig = Callable[..., KvEventsConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    def make(topic: str = "", buffer_steps: int = 100, max_queue_size: int = 100) -> KvEventsConfig:
        return KvEventsConfig(
            f"ipc://{tmp_path}/pub",
            f"ipc://{tmp_path}/replay",
            topic,
            buffer_steps=buffer_steps,
            max_queue_size=max_queue_size,
        )

    return make


def following(config: KvEventsConfig, topic: str = "") -> KvEventFollower:
    return KvEventFollower(config.endpoint, config.replay_endpoint, topic)


def name_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def stored(number: int) -> BlockStored:
    return BlockStored((name_of(number),), None, (number,), 1)


def numbers_in(follower: KvEventFollower) -> set[int | bytes]:
    return set(follower.view.blocks)


def publish_until_received(publisher: KvEventPublisher, follower: KvEventFollower) -> int:
    """Store blocks 0, 1, ... until the subscription works. Returns how many there are then."""
    for number in range(MAX_TRIES):
        publisher.publish([stored(number)])
        if follower.receive(timeout_ms=20):
            return number + 1
    raise AssertionError("nothing was received")


def test_a_subscriber_can_replay_missed_batches(make_config: MakeConfig) -> None:
    config = make_config()
    with KvEventPublisher(config, FACTS) as publisher, following(config) as follower:
        count = publish_until_received(publisher, follower)
        publisher.publish([BlockRemoved((name_of(0),))])
        while follower.view.num_removed == 0:
            assert follower.receive(PATIENCE_MS)

        assert numbers_in(follower) == set(range(1, count))
        assert follower.num_skipped == 0
        assert follower.next_sequence == count + 1


def test_a_late_subscriber_gets_the_cached_blocks(make_config: MakeConfig) -> None:
    config = make_config(buffer_steps=2)
    with KvEventPublisher(config, FACTS) as publisher, following(config) as follower:
        for number in range(6):
            publisher.publish([stored(number)])
        publisher.publish([BlockRemoved((name_of(1), name_of(4)))])
        await_value(lambda: follower.next_sequence, reaches(7), turn=follower.catch_up)

        assert numbers_in(follower) == {0, 2, 3, 5}
        assert follower.view.blocks[3].token_ids == (3,)


def test_a_late_subscriber_without_replays_gets_the_cached_blocks(make_config: MakeConfig) -> None:
    config = make_config(buffer_steps=2)
    with KvEventPublisher(config, FACTS) as publisher:
        for number in range(6):
            publisher.publish([stored(number)])
        publisher.publish([BlockRemoved((name_of(1), name_of(4)))])
        with KvEventFollower(config.endpoint) as follower:
            while follower.next_sequence < 7:
                assert follower.receive(PATIENCE_MS)
            publisher.publish([BlockRemoved((name_of(0),))])
            assert follower.receive(PATIENCE_MS)

            assert numbers_in(follower) == {2, 3, 5}


def test_a_replay_is_complete_regardless_of_earlier_replays(make_config: MakeConfig) -> None:
    config = make_config(buffer_steps=2)
    with KvEventPublisher(config, FACTS) as publisher, following(config) as follower:
        for number in range(4):
            publisher.publish([stored(number)])
        await_value(lambda: follower.next_sequence, reaches(4), turn=follower.catch_up)

        for _ in range(200):
            follower.next_sequence = 0
            follower.catch_up()
            assert follower.next_sequence == 4


def test_only_the_topic_that_is_subscribed_to_arrives(make_config: MakeConfig) -> None:
    config = make_config(topic="kv@one@model")
    with (
        KvEventPublisher(config, FACTS) as publisher,
        following(config, "kv@one") as follower,
        following(config, "kv@two") as other,
    ):
        publish_until_received(publisher, follower)

        assert other.receive(timeout_ms=0) == []


def test_a_full_queue_drops_events_with_a_visible_gap_and_never_blocks(
    make_config: MakeConfig,
) -> None:
    config = make_config(max_queue_size=2)
    publisher = KvEventPublisher(config, FACTS)
    for number in range(4):  # nothing takes them from the queue yet
        publisher.publish([stored(number)])
    with publisher, following(config) as follower:
        await_value(lambda: follower.next_sequence, reaches(2), turn=follower.catch_up)
        assert numbers_in(follower) == {0, 1}

        publisher.publish([stored(7)])
        await_value(lambda: follower.next_sequence, reaches(5), turn=follower.catch_up)

        assert numbers_in(follower) == {7}
        assert follower.num_skipped == 2
        assert follower.view.num_cleared == 1


def test_no_message_is_sent_without_events(make_config: MakeConfig) -> None:
    config = make_config()
    with KvEventPublisher(config, FACTS) as publisher, following(config) as follower:
        publisher.publish([])
        publisher.publish([AllBlocksCleared()])
        await_value(lambda: follower.next_sequence, turn=follower.catch_up)

        assert follower.next_sequence == 1


@pytest.fixture
def dealer() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    yield context.socket(zmq.DEALER)
    context.destroy(linger=0)


def test_a_malformed_request_is_ignored_and_the_next_one_served(
    make_config: MakeConfig, dealer: zmq.Socket[bytes]
) -> None:
    config = make_config(topic="t")
    with KvEventPublisher(config, FACTS) as publisher:
        publisher.publish([stored(1)])
        dealer.connect(config.replay_endpoint)
        for frames in ([b""], [b"", b"short"], [b"", bytes(8), b"more"], [b"", bytes(8)]):
            dealer.send_multipart(frames)

        answers: list[list[bytes]] = []
        while not answers or answers[-1][-1] != b"":
            assert dealer.poll(PATIENCE_MS)
            answers.append(dealer.recv_multipart())

    assert [frames[:3] for frames in answers] == [[b"", b"t", bytes(8)], [b"", b"", b"\xff" * 8]]


def test_an_endpoint_in_use_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "replay").mkdir()
    config = make_config()

    with pytest.raises(InvalidConfig, match=f"kv-events-replay-endpoint ipc://{tmp_path}/replay"):
        KvEventPublisher(config, FACTS).__enter__()


def test_a_subscriber_with_heartbeats_and_a_long_topic_is_served(make_config: MakeConfig) -> None:
    config = make_config(topic="kv@" + "n" * 600)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.HEARTBEAT_IVL, 20)
    subscriber.setsockopt(zmq.HEARTBEAT_TIMEOUT, PATIENCE_MS)
    subscriber.setsockopt(zmq.SUBSCRIBE, config.topic.encode())
    try:
        with KvEventPublisher(config, FACTS) as publisher:
            subscriber.connect(config.endpoint)
            for number in range(MAX_TRIES):
                publisher.publish([stored(number)])
                if subscriber.poll(20):
                    break
            assert subscriber.recv_multipart()[0] == config.topic.encode()
    finally:
        context.destroy(linger=0)


def test_a_req_socket_can_request_a_replay_over_tcp() -> None:
    config = KvEventsConfig(f"tcp://*:{free_port()}", f"tcp://127.0.0.1:{free_port()}", "t")
    context = zmq.Context()
    asking = context.socket(zmq.REQ)
    try:
        with KvEventPublisher(config, FACTS) as publisher:
            publisher.publish([stored(1)])
            asking.connect(config.replay_endpoint)
            asking.send(bytes(8))
            assert asking.poll(PATIENCE_MS)
            assert asking.recv_multipart()[0] == b"t"
    finally:
        context.destroy(linger=0)


def test_a_node_reconnects_to_a_listening_subscriber() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with KvEventPublisher(KvEventsConfig(endpoint), FACTS) as publisher:
        for _ in range(2):
            with listening_subscriber(endpoint) as subscriber:
                for number in range(MAX_TRIES):
                    publisher.publish([stored(number)])
                    if subscriber.poll(20):
                        break
                assert subscriber.recv_multipart()[0] == b""


@contextmanager
def listening_subscriber(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    try:
        subscriber.bind(endpoint)
        yield subscriber
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(("host", "is_reached"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_wildcard_endpoint_listens_on_the_host_of_the_node(
    host: str, *, is_reached: bool
) -> None:
    port = free_port()
    config = KvEventsConfig(f"tcp://*:{port}").for_node("n", host)
    with KvEventPublisher(config, FACTS), socket.socket() as client:
        client.bind(("127.0.0.2", 0))

        assert (client.connect_ex(("127.0.0.2", port)) == 0) == is_reached


def test_closing_the_publisher_closes_pending_connections() -> None:
    """A connection that is lost shows as a ResourceWarning."""
    for _ in range(50):
        port = free_port()
        config = KvEventsConfig(f"tcp://*:{port}").for_node("n", "127.0.0.1")
        with KvEventPublisher(config, FACTS):
            clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for client in clients:
            client.close()
    gc.collect()


@pytest.mark.parametrize(
    ("endpoint", "options", "word"),
    [
        ("5557", {}, "tcp://"),
        ("tcp://*:5557", {"replay_endpoint": "*:5558"}, "kv-events-replay-endpoint"),
        ("tcp://*:5557", {"hashes": "hex"}, "kv-events-hashes"),
        ("tcp://*:5557", {"buffer_steps": 0}, "kv-events-buffer-steps is 0"),
    ],
)
def test_invalid_settings_are_refused_by_name(
    endpoint: str, options: dict[str, object], word: str
) -> None:
    with pytest.raises(InvalidConfig, match=word):
        KvEventsConfig(endpoint, **options)  # type: ignore[arg-type]


def test_endpoints_and_topic_contain_the_node_name() -> None:
    config = KvEventsConfig("ipc:///{node_id}", "ipc:///r-{node_id}", "kv@{node_id}@m")

    named = config.for_node("decode-1", "127.0.0.1")

    assert (named.endpoint, named.replay_endpoint) == ("ipc:///decode-1", "ipc:///r-decode-1")
    assert named.topic == "kv@decode-1@m"
