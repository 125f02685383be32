"""Reset of prefix caches, from the router's gRPC and HTTP APIs to the engines of all nodes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from grpc import StatusCode, aio

from baton.client import AsyncClient, BatonError
from baton.core.ids import NodeId
from baton.core.legs import GENERATING, LegKind
from baton.core.pause_mode import PauseMode
from baton.engine.engine_thread import EngineThread
from baton.node.engine_calls import EngineCalls, NodeChanges
from baton.node.operator_orders import reset_prefix_cache
from baton.router.discovery.node_reports import report_nodes
from baton.router.doors.grpc.cluster_servicer import ClusterServicer
from baton.router.orders import node_orders
from baton.router.orders.adapter_updates import AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.router.routing.node_table import NodeTable
from baton.rpc.channel import open_channel
from baton.rpc.errors import NodeFailed
from baton.rpc.security.token import NO_OPERATORS, AcceptedTokens, Operators, authorization
from baton.rpc.security.token_gate import TokenInterceptor
from baton.rpc.server import Service, serving
from baton.v1 import cluster_pb2_grpc, node_pb2, node_pb2_grpc
from tests.support.engines import an_engine, an_engine_request
from tests.support.http_routers import an_http_router
from tests.support.node_calls import a_card
from tests.support.node_servers import NodeServer, a_node_server

PATIENCE_S = 30


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(within())


@asynccontextmanager
async def two_nodes(
    *,
    num_cached: Sequence[int | None] = (7, 9),
    operators: Operators = NO_OPERATORS,
    shared_tiers: frozenset[str] = frozenset(),
) -> AsyncIterator[tuple[NodeTable, list[NodeServer]]]:
    table, servers = NodeTable(), []
    async with AsyncExitStack() as lifetime:
        for role, num_blocks in zip(GENERATING, num_cached, strict=True):
            name = f"{role.value}-0"
            node = a_node_server(
                role,
                name,
                num_cached_blocks=num_blocks,
                operators=operators,
                shared_tiers=shared_tiers,
            )
            servers.append(await lifetime.enter_async_context(node))
            table.join(servers[-1].address, a_card(role, name))
        yield table, servers


def send_http(url: str, method: str, token: str, body: bytes | None = None) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    try:
        with urlopen(Request(url, body, headers, method=method)) as response:
            return response.status, response.read()
    except HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read()


def test_a_reset_clears_the_prefixes_of_every_node() -> None:
    async def scenario() -> None:
        async with two_nodes() as (table, servers):
            done = await NodeOrders(table, open_channel).reset_prefix_caches()

            assert {(one.node_id, one.num_blocks) for one in done} == {
                (NodeId("prefill-0"), 7),
                (NodeId("decode-0"), 9),
            }
            assert [server.resets for server in servers] == [[7], [9]]

    run(scenario)


def test_a_node_that_fails_to_reset_is_named_and_the_others_are_reset() -> None:
    async def scenario() -> None:
        async with two_nodes(num_cached=(None, 9)) as (table, servers):
            with pytest.raises(NodeFailed, match=r"1 of 2 nodes .*prefill-0: .*has stopped.*again"):
                await NodeOrders(table, open_channel).reset_prefix_caches()

            assert servers[1].resets == [9]

    run(scenario)


OPERATORS = Operators(AcceptedTokens(("secret",)))
FILES = frozenset({"file", "object"})


def test_a_reset_over_http_requires_post_and_a_token() -> None:
    async def scenario() -> None:
        async with (
            two_nodes() as (table, servers),
            an_http_router(table=table, operators=OPERATORS) as router,
        ):
            url = f"{router.url}/reset_prefix_cache"
            refused, _ = await asyncio.to_thread(send_http, url, "POST", "wrong")
            misread, _ = await asyncio.to_thread(send_http, url, "GET", "secret")
            assert [server.resets for server in servers] == [[], []]
            done, body = await asyncio.to_thread(send_http, url, "POST", "secret")

            assert (refused, misread, done) == (403, 405, 200)
            nodes = {one["node_id"]: one["num_blocks"] for one in json.loads(body)["nodes"]}
            assert nodes == {"prefill-0": 7, "decode-0": 9}

    run(scenario)


def test_a_reset_over_http_accepts_tiers() -> None:
    async def scenario() -> None:
        async with (
            two_nodes() as (table, _),
            an_http_router(table=table, operators=OPERATORS) as router,
        ):
            url = f"{router.url}/reset_prefix_cache"
            done, body = await asyncio.to_thread(
                send_http, url, "POST", "secret", b'{"tiers": ["host", "file"]}'
            )
            nodes = {one["node_id"]: one["num_blocks_by_tier"] for one in json.loads(body)["nodes"]}
            assert (done, nodes["prefill-0"]) == (200, {"host": 7, "file": 7})

            refused, body = await asyncio.to_thread(
                send_http, url, "POST", "secret", b'{"tiers": ["disk"]}'
            )
            assert (refused, "choose from kv, host, file" in str(body)) == (400, True)

    run(scenario)


def test_a_reset_over_grpc_requires_a_token() -> None:
    async def scenario() -> None:
        async with two_nodes() as (table, servers):
            gates = [TokenInterceptor(AcceptedTokens(("secret",)))]
            service = cluster_service(table, NO_OPERATORS)
            async with serving("127.0.0.1", 0, [service], interceptors=gates) as server:
                async with AsyncClient(server.address) as stranger:
                    with pytest.raises(Exception, match="token"):
                        await stranger.reset_prefix_caches()
                assert [one.resets for one in servers] == [[], []]
                async with AsyncClient(server.address, token="secret") as client:
                    assert await client.reset_prefix_caches() == {
                        "prefill-0": {"kv": 7},
                        "decode-0": {"kv": 9},
                    }
                    reset = await client.reset_prefix_caches(["host"])
                    assert reset["decode-0"] == {"host": 9}

    run(scenario)


def cluster_service(table: NodeTable, operators: Operators) -> Service:
    orders = NodeOrders(table, open_channel, operators)
    servicer = ClusterServicer(
        partial(report_nodes, table), orders, AdapterUpdates(table, open_channel)
    )
    return Service(
        "baton.v1.ClusterService",
        lambda server: cluster_pb2_grpc.add_ClusterServiceServicer_to_server(servicer, server),
    )


@pytest.mark.parametrize(
    "operators", [OPERATORS, Operators(is_open=False)], ids=["operators", "clients only"]
)
def test_a_client_token_does_not_permit_resets(operators: Operators) -> None:
    async def scenario() -> None:
        clients = AcceptedTokens(("client",))
        gates = [TokenInterceptor(clients.and_those_of(operators.tokens))]
        async with (
            two_nodes(shared_tiers=FILES) as (table, servers),
            an_http_router(table=table, tokens=clients, operators=operators) as router,
            serving(
                "127.0.0.1", 0, [cluster_service(table, operators)], interceptors=gates
            ) as server,
            AsyncClient(server.address, token="client") as client,
        ):
            for tiers in ((), ("kv",), ("file",)):
                with pytest.raises(BatonError, match="--operator-token-file") as refusal:
                    await client.reset_prefix_caches(tiers)
                assert refusal.value.reason == "NOT_AN_OPERATOR"
            url = f"{router.url}/reset_prefix_cache"
            status, body = await asyncio.to_thread(send_http, url, "POST", "client")
            assert (status, json.loads(body)["error"]["code"]) == (403, "NOT_AN_OPERATOR")
            assert [one.resets for one in servers] == [[], []]

    run(scenario)


def test_an_operator_resets_shared_tiers_of_nodes_with_the_same_operators() -> None:
    async def scenario() -> None:
        async with (
            two_nodes(shared_tiers=FILES, operators=OPERATORS) as (table, servers),
            serving("127.0.0.1", 0, [cluster_service(table, OPERATORS)]) as server,
            AsyncClient(server.address, token="client") as client,
        ):
            reset = await client.reset_prefix_caches(["file"], operator_token="secret")

            assert reset == {"prefill-0": {"file": 7}, "decode-0": {"file": 9}}
            assert all(one.resets for one in servers)

    run(scenario)


@pytest.mark.parametrize("router_operators", [NO_OPERATORS, OPERATORS])
def test_shared_tiers_are_kept_without_operators_of_the_node(router_operators: Operators) -> None:
    async def scenario() -> None:
        async with (
            two_nodes(shared_tiers=FILES) as (table, servers),
            serving("127.0.0.1", 0, [cluster_service(table, router_operators)]) as server,
            AsyncClient(server.address, token="secret") as client,
        ):
            for tiers in ((), ("file",), ("host", "object")):
                with pytest.raises(BatonError, match=r"-0: .*shared") as refusal:
                    await client.reset_prefix_caches(tiers)
                assert refusal.value.code is StatusCode.PERMISSION_DENIED
            assert [one.resets for one in servers] == [[], []]

            assert set(await client.reset_prefix_caches(["kv"])) == {"prefill-0", "decode-0"}

    run(scenario)


def test_only_an_operator_drains_or_resets_a_node_itself() -> None:
    async def scenario() -> None:
        async with (
            a_node_server(operators=OPERATORS) as node,
            open_channel(node.address) as channel,
        ):
            stub = node_pb2_grpc.NodeServiceStub(channel)
            stranger = (authorization("client"),)
            reset = node_pb2.ResetPrefixCacheRequest(tiers=["kv"])
            with pytest.raises(aio.AioRpcError) as refused_drain:
                await stub.Drain(node_pb2.DrainRequest(), metadata=stranger)
            with pytest.raises(aio.AioRpcError) as refused_reset:
                await stub.ResetPrefixCache(reset, metadata=stranger)
            assert refused_drain.value.code() is StatusCode.PERMISSION_DENIED
            assert refused_reset.value.code() is StatusCode.PERMISSION_DENIED
            assert (node.state.is_draining, node.resets) == (False, [])

            await stub.Drain(node_pb2.DrainRequest(), metadata=OPERATORS.metadata)

            assert node.state.is_draining

    run(scenario)


def test_an_engine_resets_between_two_steps_and_computes_again() -> None:
    core = an_engine()
    prompt = tuple(range(9))

    async def num_cached(calls: EngineCalls, name: str) -> int:
        request = an_engine_request(name, prompt=prompt)
        async with aclosing(calls.stream_outputs(request)) as outputs:
            served = [output.served async for output in outputs][-1]
        assert served is not None
        return served.num_cached_tokens

    async def scenario() -> None:
        with EngineThread(core) as engine, EngineCalls(engine, NodeChanges()) as calls:
            reset = partial(reset_prefix_cache, engine, core.scheduler)
            assert [await num_cached(calls, name) for name in "ab"] == [0, 8]
            # Two blocks of the prompt, and one of it and the answer.
            assert await reset(()) == {"kv": 3}
            assert await reset(()) == {"kv": 0}
            assert [await num_cached(calls, name) for name in "cd"] == [0, 8]

    run(scenario)


def test_an_operator_changes_the_legs_of_a_node_by_its_name() -> None:
    async def scenario() -> None:
        async with (
            two_nodes(operators=OPERATORS) as (table, servers),
            serving("127.0.0.1", 0, [cluster_service(table, OPERATORS)]) as server,
            AsyncClient(server.address, token="client") as client,
        ):
            with pytest.raises(BatonError, match="--operator-token-file"):
                await client.set_legs("decode-0", [LegKind.PREFILL], 0.0)
            with pytest.raises(BatonError, match=r"no node 'decode-1' .* decode-0, prefill-0"):
                await client.set_legs("decode-1", [LegKind.PREFILL], 0.0, "secret")
            with pytest.raises(BatonError, match="name prefill legs, decode legs or both"):
                await client.set_legs("decode-0", [], 0.0, "secret")
            with pytest.raises(BatonError, match="drain_timeout_s is nan"):
                await client.set_legs("decode-0", GENERATING, math.nan, "secret")

            assert await client.set_legs("decode-0", GENERATING, 0.0, "secret") == GENERATING
            address = servers[0].address
            assert await client.set_legs(address, [LegKind.DECODE], 0.0, "secret") == (
                LegKind.DECODE,
            )
            assert [one.state.legs.offered for one in servers] == [(LegKind.DECODE,), GENERATING]

    run(scenario)


def test_a_node_that_hangs_after_its_drain_ends_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_orders, "DRAIN_MARGIN_S", 0.1)
    released = asyncio.Event()

    async def hang_in_a_leg(node: NodeServer) -> None:
        with node.state.legs.serving(LegKind.DECODE):
            try:
                await released.wait()
            except asyncio.CancelledError:  # it is to move to another node
                await released.wait()

    async def scenario() -> None:
        async with (
            two_nodes(operators=OPERATORS) as (table, servers),
            serving("127.0.0.1", 0, [cluster_service(table, OPERATORS)]) as server,
            AsyncClient(server.address, token="secret") as client,
        ):
            leg = asyncio.ensure_future(hang_in_a_leg(servers[1]))
            with pytest.raises(BatonError, match="decode-0 has not answered in time") as failure:
                await client.set_legs("decode-0", [LegKind.PREFILL], 0.0)
            released.set()
            await leg

            assert failure.value.reason == "DEADLINE_EXCEEDED"

    run(scenario)


def test_only_an_operator_pauses_a_node_by_its_name() -> None:
    async def scenario() -> None:
        async with (
            two_nodes(operators=OPERATORS) as (table, servers),
            serving("127.0.0.1", 0, [cluster_service(table, OPERATORS)]) as server,
            AsyncClient(server.address, token="client") as client,
        ):
            with pytest.raises(BatonError, match="--operator-token-file"):
                await client.set_pause("decode-0", PauseMode.KEEP)
            with pytest.raises(BatonError, match=r"no node 'decode-1' .* decode-0, prefill-0"):
                await client.set_pause("decode-1", PauseMode.KEEP, "secret")
            assert not any(one.state.is_paused for one in servers)

    run(scenario)
