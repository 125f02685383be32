"""Router benchmark on a small scale: real processes and plausible figures."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.ids import HandoffId, NodeId, Peer
from baton.core.legs import LegKind
from baton.core.request import EngineRequest, ReceiveKv
from baton.core.sampling import SamplingParams
from baton.router.dispatch.node_calls import NodeStream
from baton.rpc.channel import open_channel
from baton.rpc.messages.calls import leg_order, node_request_id
from baton.v1 import node_pb2, node_pb2_grpc
from benchmarks.processes import server
from benchmarks.router.cpu_time import Round, RouterBench, run

SMALL = RouterBench(
    model="",
    num_streams=4,
    answer_tokens=12,
    prompt_tokens=32,
    interval_ms=1.0,
    num_first_tokens=2,
    num_rounds=2,
)


def test_every_round_has_all_figures() -> None:
    rounds: list[Round] = []

    figures = {figure.name: figure for figure in run(SMALL, rounds.append)}

    assert len(rounds) == SMALL.num_rounds
    assert figures["cpu_us_per_request"].median > 0
    assert figures["bare_us_per_token"].median > 0
    assert figures["router_ttft_ms"].least > 0
    assert 0 < figures["tokens_per_s"].median < 4 * 1000


@pytest.mark.parametrize(("peer", "first"), [(None, 0), (Peer(NodeId("p"), "p:1"), 1)])
def test_a_canned_node_returns_max_tokens_tokens(peer: Peer | None, first: int) -> None:
    with server("benchmarks.router.canned_node", "--role", "decode") as node:
        reported = asyncio.run(_answer_of(node.address, peer))

    assert [one.output.first_index for one in reported] == list(range(first, 6))
    assert reported[-1].output.finish_reason
    assert reported[0].HasField("summary")


async def _answer_of(address: str, peer: Peer | None) -> list[node_pb2.CallEvent]:
    handoff_id = HandoffId("a", 1)
    request = EngineRequest(
        node_request_id(handoff_id),
        (1, 2),
        SamplingParams(max_tokens=6),
        seed=0,
        receive_from=None if peer is None else ReceiveKv(handoff_id, peer),
    )
    async with open_channel(address) as channel:
        stream = NodeStream(node_pb2_grpc.LegServiceStub(channel).Serve)
        order = leg_order(LegKind.DECODE, request)
        events: list[node_pb2.CallEvent] = []
        await stream.call(order, events.append)
        return events
