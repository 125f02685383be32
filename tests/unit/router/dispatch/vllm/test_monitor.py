"""Health, load and checks of vLLM servers, over real connections and with a node of numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import RequestId
from baton.core.legs import LegKind
from baton.core.output import Output, TokenLogprobs
from baton.core.request import EngineRequest
from baton.router.discovery.sources import VllmServer
from baton.router.dispatch.node_rpcs import Deliver, LegOutput
from baton.router.dispatch.vllm.monitor import ServerMonitor, is_name_of
from baton.router.dispatch.vllm.servers import PrefillServers, ServerLoad, read_load
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Leg
from baton.router.tracing import UNTRACED, RequestTrace
from baton.rpc.errors import NodeFailed
from baton.rpc.messages.calls import CallReport
from baton.rpc.node_info import NodeAvailability, NodeStatus
from tests.support.fake_vllm_api import PARAMS, FakeApi, serving
from tests.support.node_calls import a_node

NEXT = {5: -0.5, 6: -1.5}


def logprob_of(token_id: int) -> float:
    return -1.0 - token_id / 50


@dataclass
class FakeNode:
    """Computes logprobs of numbers, and reads KV."""

    num_loaded: int = 96
    next_with_kv: dict[int, float] = field(default_factory=lambda: dict(NEXT))
    is_failing: bool = False
    refusal: str = ""  # of KV
    requests: list[EngineRequest] = field(default_factory=list)

    async def call(
        self,
        leg: Leg,
        request: EngineRequest,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        trace: RequestTrace = UNTRACED,
    ) -> None:
        if self.is_failing:
            raise NodeFailed("gone")
        if self.refusal and request.foreign_kv is not None:
            raise InvalidRequest(self.refusal)
        self.requests.append(request)
        prompt: list[TokenLogprobs | None] = [None] if request.foreign_kv is None else []
        prompt += [
            TokenLogprobs(token, logprob_of(token), 1) for token in request.prompt_token_ids[1:]
        ]
        top = NEXT if request.foreign_kv is None else self.next_with_kv
        output = Output(
            RequestId("r"),
            0,
            (5,),
            logprobs=(TokenLogprobs(5, -0.5, 1, tuple(top.items())),),
            prompt_logprobs=tuple(prompt) if request.foreign_kv is None else (),
        )
        loaded = {} if request.foreign_kv is None else {"vllm": self.num_loaded}
        deliver(LegOutput(LegKind.DECODE, (output,), CallReport(prompt_tokens_loaded=loaded)))


def completion(apart: float = 0.0) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the answer of a server whose logprobs are `apart` from those of the node."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        rest: Sequence[int] = body["prompt"][1:]
        entries = [None, *({str(token): {"logprob": logprob_of(token) - apart}} for token in rest)]
        return {"choices": [{"prompt_logprobs": entries}], "kv_transfer_params": PARAMS}

    return answer


@dataclass
class World:
    servers: PrefillServers
    monitor: ServerMonitor
    table: NodeTable

    @property
    def status(self) -> NodeStatus:
        [status] = self.servers.report()
        return status

    @property
    def is_used(self) -> bool:
        return bool(self.servers.choose("tiny", 100))


def a_world(addresses: Sequence[VllmServer], node: FakeNode) -> World:
    table, decode = NodeTable(), a_node(LegKind.DECODE, "d")
    table.join(decode.address, decode.card)
    servers = PrefillServers(addresses, table, lambda: 0.0)
    monitor = ServerMonitor(servers.all[0], servers, ModelProfiles(table), node)
    return World(servers, monitor, table)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_server_is_used_once_its_check_with_a_node_has_passed() -> None:
    async def test() -> None:
        api, node = FakeApi(), FakeNode()
        api.answer = completion()
        async with serving(api) as addresses:
            world = a_world(addresses, node)
            assert world.status.state is NodeAvailability.UNREACHABLE
            await world.monitor.poll()
            assert (world.status.state, world.is_used) == (NodeAvailability.NOT_READY, False)
            assert "not over" in world.status.reason
            await world.monitor.check_nodes()
            assert world.is_used
            assert world.status == NodeStatus(
                (LegKind.PREFILL,),
                str(addresses[0]),
                NodeAvailability.READY,
                node_id="vllm",
                incarnation="engine",
                model="served",
                version="0.32.0",
                kv_transport="nixl",
                num_running=3,
                num_waiting=2,
            )
            computed, read = node.requests
            assert computed.foreign_kv is None
            assert read.foreign_kv is not None
            assert computed.prompt_token_ids == read.prompt_token_ids
            # Neither finds the other's KV in the prefix cache, nor that of any request.
            assert "" != computed.cache_salt != read.cache_salt != ""
            assert computed.kv_hints.release
            assert read.kv_hints.release
            await world.monitor.check_nodes()
            assert len(node.requests) == 2  # once for each process of a node

    run(test)


MISMATCHES = {
    "weights": (completion(0.5), FakeNode(), "other weights: logprobs of a text are 0.50 apart"),
    "not read": (completion(), FakeNode(num_loaded=0), "the node read KV of 0 tokens of 100"),
    "not listed": (completion(), FakeNode(refusal="not in --kv-sources"), "not in --kv-sources"),
    "misread": (completion(), FakeNode(next_with_kv={5: -4.0, 9: -1.0}), "packing="),
}


@pytest.mark.parametrize(("answer", "node", "reason"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatches_are_named_and_the_server_is_not_used(
    answer: Callable[[dict[str, Any]], dict[str, Any]], node: FakeNode, reason: str
) -> None:
    async def test() -> None:
        api = FakeApi()
        api.answer = answer
        async with serving(api) as addresses:
            world = a_world(addresses, node)
            await world.monitor.poll()
            await world.monitor.check_nodes()
            assert (world.status.state, world.is_used) == (NodeAvailability.MISMATCHED, False)
            assert world.status.reason.startswith(f"d:1: {reason}") or reason in world.status.reason
            # It can be used with another node, which is checked when it joins.
            other = a_node(LegKind.DECODE, "d2")
            world.table.join(other.address, other.card)
            api.answer = completion()
            node.num_loaded, node.next_with_kv, node.refusal = 96, dict(NEXT), ""
            await world.monitor.check_nodes()
            assert world.servers.readers(world.servers.all[0], "tiny") == {"d2:1"}
            assert world.status.state is NodeAvailability.READY
            assert world.status.reason.startswith("d:1: ")

    run(test)


def test_a_server_of_another_model_is_refused_by_name() -> None:
    async def test() -> None:
        api, node = FakeApi(), FakeNode()
        api.pages["/v1/models"] = {"data": [{"id": "llama", "root": "org/llama"}]}
        async with serving(api) as addresses:
            world = a_world(addresses, node)
            await world.monitor.poll()
            await world.monitor.check_nodes()
            assert world.status.state is NodeAvailability.MISMATCHED
            assert world.status.reason == "d:1: it serves llama, and the node tiny"
            assert not node.requests

    run(test)


def test_a_server_that_ends_is_checked_again_when_it_is_back() -> None:
    async def test() -> None:
        api, node = FakeApi(), FakeNode()
        api.answer = completion()
        async with serving(api) as addresses:
            world = a_world(addresses, node)
            await world.monitor.poll()
            await world.monitor.check_nodes()
            health = api.pages.pop("/health")
            api.pages["/health"] = b""
            api.pages["/metrics"] = b"\xff" * (1 << 23)  # more than any page
            await world.monitor.poll()
            assert (world.status.state, world.is_used) == (NodeAvailability.UNREACHABLE, False)
            assert "more than" in world.status.reason
            api.pages |= {"/health": health, "/metrics": b""}
            await world.monitor.poll()
            assert not world.is_used
            await world.monitor.check_nodes()
            assert world.is_used

    run(test)


def test_a_check_that_fails_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.dispatch.vllm.monitor.RETRY_CHECK_S", 0.0)

    async def test() -> None:
        api, node = FakeApi(), FakeNode(is_failing=True)
        api.answer = completion()
        async with serving(api) as addresses:
            world = a_world(addresses, node)
            await world.monitor.poll()
            await world.monitor.check_nodes()
            assert (world.status.state, world.is_used) == (NodeAvailability.NOT_READY, False)
            assert "no check with d:1" in world.status.reason
            node.is_failing = False
            await world.monitor.check_nodes()
            assert world.is_used

    run(test)


def test_load_is_read_from_all_engines_of_a_server() -> None:
    page = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_requests_waiting{engine="1"} broken
vllm:num_requests_waiting{engine="2"} NaN
vllm:num_requests_running{engine="2"} +Inf
vllm:kv_cache_usage_perc{engine="2"} NaN
"""
    assert read_load(page) == ServerLoad(4, 2, 0.75)
    assert read_load("") == ServerLoad()


@pytest.mark.parametrize(
    ("served", "root", "is_equal"),
    [
        ("/models/tiny", "/models/tiny", True),
        ("chat", "org/tiny", True),
        ("tiny", "", True),
        ("tiny-2", "/models/tiny-2", False),
        ("", "", False),
    ],
)
def test_models_are_compared_by_name_or_folder(served: str, root: str, *, is_equal: bool) -> None:
    assert is_name_of("tiny", served, root) is is_equal
