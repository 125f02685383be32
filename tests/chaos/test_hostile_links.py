"""Links of a hostile peer: an invalid Hello, or a valid one followed by invalid messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import grpc
import pytest

from baton.cluster import LocalCluster
from baton.rpc.node_info import GET_NODE
from baton.v1 import kv_link_pb2, kv_link_pb2_grpc, node_pb2, node_pb2_grpc
from tests.support.honest_client import honest_client_undisturbed

PATIENCE_S = 30.0
LinkMessage = kv_link_pb2.LinkMessage
Hello = kv_link_pb2.Hello
Change = Callable[[Hello], None]

pytestmark = pytest.mark.slow


def hello_to(channel: grpc.Channel) -> Hello:
    """Return the Hello of an honest decode node, made from the node's public description."""
    node = node_pb2_grpc.NodeServiceStub(channel).GetNode(GET_NODE)
    region = kv_link_pb2.Region(base=4096, num_blocks=8, block_bytes=node.block_bytes, device="cpu")
    return Hello(
        node_id="stranger",
        incarnation="1",
        fingerprint=node.fingerprint,
        region=region,
        transport=node.kv_transport,
        metadata=b"elsewhere 1 2\0not an agent",
    )


@dataclass(frozen=True, slots=True)
class Word:
    """Messages that the node sent before it ended the link, and the final status."""

    received: list[LinkMessage]
    code: grpc.StatusCode
    details: str


def last_word(channel: grpc.Channel, *sent: LinkMessage) -> Word:
    """Send these messages, keep the link open and return the node's reply."""
    is_over = threading.Event()

    def requests() -> Iterator[kv_link_pb2.LinkRequest]:
        for one in sent:
            yield kv_link_pb2.LinkRequest(message=one)
        is_over.wait(PATIENCE_S)

    call = kv_link_pb2_grpc.KvLinkServiceStub(channel).Link(requests(), timeout=PATIENCE_S)
    received: list[LinkMessage] = []
    with suppress(grpc.RpcError):
        received += (response.message for response in call)
    is_over.set()
    return Word(received, call.code(), call.details() or "")


def grant(block_id: int = 0, lease_s: float = 5.0) -> LinkMessage:
    return LinkMessage(
        grant=kv_link_pb2.Grant(
            handoff_id=node_pb2.HandoffId(request_id="stranger's", attempt=1),
            ticket=1,
            block_ids=[block_id],
            lease_s=lease_s,
        )
    )


@pytest.mark.parametrize("lease_s", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_an_invalid_lease_ends_the_link_with_a_named_error(
    cluster: LocalCluster,
    channel_of: dict[str, grpc.Channel],
    right_answer: tuple[int, ...],
    lease_s: float,
) -> None:
    channel = channel_of["prefill"]
    renew = LinkMessage(renew=kv_link_pb2.Renew(lease_s=lease_s))

    with honest_client_undisturbed(cluster, right_answer):
        for message in (grant(lease_s=lease_s), renew):
            word = last_word(channel, LinkMessage(hello=hello_to(channel)), message)
            assert word.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "a lease of" in word.details


def region_of(size: int) -> Change:
    def change(hello: Hello) -> None:
        hello.region.num_blocks = size

    return change


def device_of(name: str) -> Change:
    def change(hello: Hello) -> None:
        hello.region.device = name

    return change


def base_of(address: int) -> Change:
    def change(hello: Hello) -> None:
        hello.region.base = address

    return change


@pytest.mark.parametrize(
    "change",
    [region_of(0), region_of(2**40), device_of("cuda:x"), device_of("🙂"), base_of(2**64 - 1)],
)
def test_an_invalid_region_ends_the_link_with_the_reason(
    cluster: LocalCluster,
    channel_of: dict[str, grpc.Channel],
    right_answer: tuple[int, ...],
    change: Change,
) -> None:
    channel = channel_of["prefill"]
    hello = hello_to(channel)
    change(hello)

    with honest_client_undisturbed(cluster, right_answer):
        word = last_word(channel, LinkMessage(hello=hello))

    assert word.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "metadata", [b"", b"\0", b"\xff\xfe\0x", b"a b c\0", b"a 1\0", b"x" * 9999]
)
def test_unusable_transport_metadata_is_refused_with_a_closed_message(
    cluster: LocalCluster,
    channel_of: dict[str, grpc.Channel],
    right_answer: tuple[int, ...],
    metadata: bytes,
) -> None:
    channel = channel_of["prefill"]
    hello = hello_to(channel)
    hello.metadata = metadata

    with honest_client_undisturbed(cluster, right_answer):
        word = last_word(channel, LinkMessage(hello=hello))

    assert [one.WhichOneof("message") for one in word.received] == ["hello", "closed"]


@pytest.mark.parametrize("block_id", [8, 2**31, 2**32 - 1])
def test_blocks_outside_the_region_of_the_peer_end_the_link(
    cluster: LocalCluster,
    channel_of: dict[str, grpc.Channel],
    right_answer: tuple[int, ...],
    block_id: int,
) -> None:
    channel = channel_of["prefill"]

    with honest_client_undisturbed(cluster, right_answer):
        word = last_word(channel, LinkMessage(hello=hello_to(channel)), grant(block_id))

    assert [one.WhichOneof("message") for one in word.received] == ["hello", "closed"]
    assert "blocks that it does not have" in word.received[-1].closed.reason
