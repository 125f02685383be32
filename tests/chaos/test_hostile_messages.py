"""Hostile messages on every RPC of a running cluster: named errors, and no effect on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc import StatusCode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.cluster import LocalCluster
from baton.core.ids import HandoffId, RequestId
from baton.core.legs import LegKind
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.rpc.messages.calls import leg_order
from baton.v1 import cluster_pb2, inference_pb2, kv_link_pb2, node_pb2
from tests.support.honest_client import honest_client_undisturbed
from tests.support.hostile_messages import on_the_wire
from tests.support.hypothesis_profiles import num_examples

PATIENCE_S = 30.0  # a call without a response for so long hangs
NUM_RESPONSES_READ = 3
# gRPC turns exceptions that are not named into UNKNOWN.
UNNAMED = {StatusCode.UNKNOWN, StatusCode.DEADLINE_EXCEEDED, StatusCode.UNAVAILABLE}

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Target:
    """Method and the process of the cluster that serves it."""

    served_by: str
    method: MethodDescriptor

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"


def targets() -> Iterator[Target]:
    for served_by, module in (
        ("router", inference_pb2),
        ("router", cluster_pb2),
        ("prefill", node_pb2),
        ("prefill", kv_link_pb2),
    ):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                is_of_decode = service.name == "DecodeService"
                yield Target("decode" if is_of_decode else served_by, method)


# A valid order that no decode node claims: after its first token the call waits for a minute.
UNCLAIMED = node_pb2.ServeRequest(
    call=1,
    start=leg_order(
        LegKind.PREFILL,
        EngineRequest(
            request_id=RequestId("unclaimed#1"),
            prompt_token_ids=(5, 6, 7),
            sampling=SamplingParams(max_tokens=4),
            seed=0,
            send_to=HandoffId("unclaimed", 1),
        ),
    ),
)
# Drain requests have no content that could be hostile, and end the node.
TARGETS = [target for target in targets() if target.method.name != "Drain"]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.method.full_name)
def test_a_hostile_message_gets_a_named_error_and_affects_no_other_client(
    cluster: LocalCluster,
    channel_of: dict[str, grpc.Channel],
    right_answer: tuple[int, ...],
    target: Target,
) -> None:
    channel = channel_of[target.served_by]
    one = on_the_wire(target.method.input_type)
    is_stream = target.method.client_streaming
    sent = st.lists(one, min_size=1, max_size=4) if is_stream else st.tuples(one)

    @settings(
        max_examples=num_examples(60),
        suppress_health_check=list(HealthCheck),
    )
    @given(sent)
    def sends(messages: Sequence[bytes]) -> None:
        ended = outcome_of(channel, target, messages)
        assert ended.code not in UNNAMED, ended
        assert [child.process.poll() for child in cluster.children] == [None] * 3

    if target.method.name == "Prefill":
        sends = example([UNCLAIMED.SerializeToString()])(sends)
    with honest_client_undisturbed(cluster, right_answer):
        sends()


@dataclass(frozen=True, slots=True)
class Ended:
    code: StatusCode
    details: str


def outcome_of(channel: grpc.Channel, target: Target, messages: Sequence[bytes]) -> Ended:
    """Return the status of the call; OK if it was cancelled because it has no end."""
    is_stream = target.method.client_streaming
    make: Any = channel.stream_stream if is_stream else channel.unary_stream
    method = make(target.path, request_serializer=bytes, response_deserializer=bytes)
    call = method(iter(messages) if is_stream else messages[0], timeout=PATIENCE_S)
    try:
        for number, response in enumerate(call, 1):
            if number == NUM_RESPONSES_READ or may_wait_after(target.method.name, response):
                break
    except grpc.RpcError:
        return Ended(call.code(), call.details() or "")
    finally:
        call.cancel()
    return Ended(StatusCode.OK, "")


def may_wait_after(method: str, response: bytes) -> bool:
    """Return whether the next response can take long: a change, or the claim of a decode node."""
    if method == "Prefill":
        events = node_pb2.ServeResponse.FromString(response).events
        return any(event.HasField("output") for event in events)
    return method.startswith("Watch")
