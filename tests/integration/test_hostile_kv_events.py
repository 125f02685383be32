"""Hostile peers of the KV event sockets: memory and replays of the node, and its end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from benchmarks.chaos.hostile.zmtp_client import (
    MORE,
    RawZmtpClient,
    frame,
    replay_request,
    subscription,
)
from tests.support.kv_event_process import NUM_MESSAGES, TOPIC, KvEventProcess, kv_event_process
from tests.support.waits import await_value, reaches
from tools.follow_kv_events import KvEventFollower

pytestmark = pytest.mark.slow

MIB = 1 << 20
SENT_BYTES = 64 * MIB
IN_KERNEL_BYTES = 16 * MIB  # of a connection, in the buffers of both ends
MAX_GROWTH_BYTES = 32 * MIB
MAX_DESCRIPTORS = 256
NUM_HALF_OPEN = 750  # of each socket
NUM_SLOW = 30
PATIENCE_S = 30
SENDING_S = 1.0


@pytest.fixture
def node() -> Iterator[KvEventProcess]:
    """A node that must still serve a replay and end by SIGTERM afterwards."""
    with kv_event_process(MAX_DESCRIPTORS) as running:
        replay_all(running)  # its first replay loads all that one needs
        running.start_rss_bytes = running.rss_bytes
        yield running
        replay_all(running)
        assert running.growth_bytes < MAX_GROWTH_BYTES
        ends(running)


def replay_all(node: KvEventProcess) -> None:
    with KvEventFollower(node.endpoint, node.replay_endpoint, TOPIC) as follower:
        await_value(lambda: follower.next_sequence, reaches(NUM_MESSAGES), turn=follower.catch_up)
        assert len(follower.view.blocks) == NUM_MESSAGES


def ends(node: KvEventProcess) -> None:
    node.program.send_signal(signal.SIGTERM)
    assert node.program.wait(PATIENCE_S) == 0


def connected(endpoint: str, socket_type: bytes) -> RawZmtpClient:
    client = RawZmtpClient(endpoint)
    client.shake_hands(socket_type)
    return client


def test_a_frame_of_gigabytes_is_not_read(node: KvEventProcess) -> None:
    for endpoint, kind in ((node.endpoint, b"SUB"), (node.replay_endpoint, b"DEALER")):
        with connected(endpoint, kind) as client:
            assert client.send_long_frame(6 << 30, SENT_BYTES) < IN_KERNEL_BYTES


def distinct_subscriptions(num_bytes: int) -> list[bytes]:
    size = 2000
    return [
        subscription(number.to_bytes(8, "big").ljust(size, b"x"))
        for number in range(num_bytes // size)
    ]


def parts_of_an_endless_message(num_bytes: int) -> list[bytes]:
    size = 2000
    return [frame(b"x" * size, MORE)] * (num_bytes // size)


@pytest.mark.parametrize("pieces", [distinct_subscriptions, parts_of_an_endless_message])
def test_data_of_one_connection_is_not_buffered_without_limit(
    node: KvEventProcess, pieces: Callable[[int], Sequence[bytes]]
) -> None:
    for endpoint, kind in ((node.endpoint, b"SUB"), (node.replay_endpoint, b"DEALER")):
        with connected(endpoint, kind) as client:
            client.send_until_refused(pieces(SENT_BYTES), SENDING_S)
            replay_all(node)
            assert node.growth_bytes < MAX_GROWTH_BYTES


def test_replays_to_clients_that_never_read_use_no_memory(node: KvEventProcess) -> None:
    with ExitStack() as stack:
        for _ in range(NUM_SLOW):
            client = stack.enter_context(connected(node.replay_endpoint, b"DEALER"))
            client.socket.sendall(replay_request(0) * 4)
        replay_all(node)
        for _ in range(NUM_SLOW):
            subscriber = stack.enter_context(connected(node.endpoint, b"SUB"))
            subscriber.socket.sendall(subscription(TOPIC.encode()))
        replay_all(node)
        assert node.growth_bytes < MAX_GROWTH_BYTES


def test_half_open_connections_block_neither_others_nor_the_end() -> None:
    with kv_event_process(MAX_DESCRIPTORS) as node, ExitStack() as stack:
        for endpoint in (node.endpoint, node.replay_endpoint):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            for _ in range(NUM_HALF_OPEN):
                one = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
                stack.enter_context(one)
        replay_all(node)
        ends(node)
