"""Drain timeout: a process that cannot finish its requests ends within a bounded time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from baton.client import Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.ids import RequestId
from baton.core.legs import LegKind
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.rpc.messages.calls import leg_order
from baton.rpc.process_end import CUT_OFF
from baton.v1 import node_pb2, node_pb2_grpc
from tests.support.engine_nodes import EngineNode
from tests.support.engine_pair import OPERATOR, PairOptions, greedy
from tests.support.models import prompt_of
from tests.support.nodes import drain
from tests.support.suspended_processes import suspended

GRACE_S = 1.0
WAIT_S = 60.0

Drain = Callable[[EngineNode], None]


def by_signal(node: EngineNode) -> None:
    node.terminate()


def by_drain_call(node: EngineNode) -> None:
    drain(node.address, OPERATOR)


@pytest.fixture
def node(model_folder: Path) -> Iterator[EngineNode]:
    options = replace(PairOptions(model_folder).of(LegKind.DECODE), drain_timeout_s=GRACE_S)
    one = EngineNode(LegKind.DECODE, options).await_ready()
    yield one
    one.kill()


@pytest.mark.parametrize("drain", [by_signal, by_drain_call])
@pytest.mark.parametrize("client_stays", [True, False])
def test_a_node_with_a_stuck_engine_exits_after_the_drain_timeout(
    node: EngineNode, drain: Drain, client_stays: bool
) -> None:
    node.hold_before_pass(1)
    with grpc.insecure_channel(node.address) as channel:
        order = leg_order(
            LegKind.DECODE, EngineRequest(RequestId("a#1"), prompt_of(9), greedy(4), seed=0)
        )
        requests = iter([node_pb2.ServeRequest(call=1, start=order)])
        call = node_pb2_grpc.LegServiceStub(channel).Serve(requests)
        node.await_held()
        if not client_stays:
            call.cancel()

        drain(node)

        assert node.exit_code(WAIT_S) == CUT_OFF


def test_a_router_with_endless_requests_exits_after_the_drain_timeout(
    cluster_options: Callable[..., ClusterOptions],
) -> None:
    options = cluster_options(num_prefill=0, router_arguments=("--drain-timeout-s", f"{GRACE_S:g}"))
    generation = Generation(SamplingParams(max_tokens=400, ignore_eos=True))
    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        [decode] = cluster.decodes
        stream = client.stream(prompt_of(20), generation)
        next(stream)
        with suspended(decode):
            cluster.router.request_stop()
            code = cluster.router.process.wait(WAIT_S)
        stream.close()

    assert code == CUT_OFF
    assert "1 requests unfinished: exiting" in cluster.router.log
    assert decode.process.returncode == 0
