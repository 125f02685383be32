"""Adapters that the router loads and unloads on all nodes, over gRPC, with nodes that report."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from grpc import StatusCode

from baton.client import BatonError
from baton.core.ids import AdapterRef, ModelVariant, NodeId
from baton.router.orders import adapter_updates
from baton.rpc.channel import open_channel
from baton.rpc.errors import AdapterUnreadable, NodeFailed
from baton.rpc.node_info import GET_NODE, NodeAvailability
from baton.rpc.security.token import NO_OPERATORS, AcceptedTokens, Operators
from baton.v1 import node_pb2_grpc
from tests.support.adapter_nodes import (
    OPERATORS,
    PATIENCE_S,
    AdapterNode,
    adapter_cards,
    adapter_cluster,
    adapter_id,
    operator_client,
    run_scenario,
)
from tests.support.waits import until

FILES = {"tenants/sql": "old", "tenants/new": "new"}
SQL = AdapterRef("sql", adapter_id("old"), "tenants/sql")
BOTH = {"prefill-0": {"sql"}, "decode-0": {"sql"}}
NONE: dict[str, set[str]] = {"prefill-0": set(), "decode-0": set()}


def test_an_adapter_is_served_by_all_nodes_when_the_load_returns() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            assert await client.load_adapter("sql", "tenants/sql") == (SQL, 2)

            assert cluster.held == BOTH
            assert cluster.table.find_model("sql") == ModelVariant("tiny", SQL)
            async for [first, *_] in client.nodes():
                assert first.adapters.named == (SQL,)
                assert (first.state, first.max_loras) == (NodeAvailability.READY, 4)

            assert await client.unload_adapter("sql") == 2
            assert cluster.held == NONE
            assert cluster.table.find_model("sql") == ModelVariant("sql")

    run_scenario(scenario)


def test_a_node_that_refuses_is_named_and_no_node_keeps_the_adapter() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            cluster.nodes[1].delete("tenants/sql")

            with pytest.raises(BatonError, match=r"1 of 2 .* \(decode-0: path .*no file") as error:
                await client.load_adapter("sql", "tenants/sql")

            assert error.value.code is StatusCode.INVALID_ARGUMENT
            assert cluster.held == NONE
            await cluster.until(lambda: "sql" not in cluster.table.served.variants)

    run_scenario(scenario)


def test_a_node_that_fails_is_named_and_no_node_keeps_the_adapter() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            cluster.nodes[0].memory.faults = [
                NodeFailed("the disk is gone")
            ] * 9  # clients try again

            with pytest.raises(
                BatonError, match=r"prefill-0: the disk is gone.*try again"
            ) as error:
                await client.load_adapter("sql", "tenants/sql")

            assert error.value.reason == "NODE_FAILED"
            assert cluster.held == NONE

    run_scenario(scenario)


def test_a_file_system_that_does_not_answer_holds_up_loads_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def answer_late(path: Path) -> bool:
        asked.set()
        assert may_answer.wait(PATIENCE_S)
        return path.exists()

    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            [prefill, _] = cluster.nodes
            monkeypatch.setattr(Path, "is_file", answer_late)
            loading = asyncio.ensure_future(client.load_adapter("sql", "tenants/sql"))
            await asyncio.to_thread(asked.wait, PATIENCE_S)
            using = asyncio.ensure_future(use(prefill, replace(SQL, name="chat")))

            channel = open_channel(cluster.node("prefill-0").address)
            async with channel:
                stub = node_pb2_grpc.NodeServiceStub(channel)
                card = await stub.GetNode(GET_NODE)
            assert card.node_id == "prefill-0"
            assert not loading.done()
            assert not using.done()
            may_answer.set()

            assert await loading == (SQL, 2)
            await using

    try:
        run_scenario(scenario)
    finally:
        may_answer.set()


async def use(node: AdapterNode, adapter: AdapterRef) -> None:
    async with node.registry.held(adapter):
        pass


def test_a_load_whose_client_disconnects_while_nodes_read_changes_nothing() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            first, last = cluster.nodes
            last.memory.may_read.clear()
            loading = asyncio.ensure_future(client.load_adapter("sql", "tenants/sql"))
            await until(lambda: SQL.id in first.memory.loaded)

            loading.cancel()
            await asyncio.wait([loading])
            last.memory.may_read.set()

            await client.load_adapter("chat", "tenants/sql")
            assert {name for held in cluster.held.values() for name in held} == {"chat"}

    run_scenario(scenario)


def test_a_load_that_takes_long_does_not_hold_up_others() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            await client.load_adapter("chat", "tenants/sql")
            cluster.nodes[1].memory.may_read.clear()
            loading = asyncio.ensure_future(client.load_adapter("sql", "tenants/new"))
            await until(lambda: adapter_id("new") in cluster.nodes[0].memory.loaded)

            await client.load_adapter("again", "tenants/sql")
            await client.unload_adapter("chat")
            assert not loading.done()
            cluster.nodes[1].memory.may_read.set()

            await loading
            assert {name for held in cluster.held.values() for name in held} == {"again", "sql"}

    run_scenario(scenario)


def test_more_updates_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_updates, "MAX_UPDATES", 1)
    monkeypatch.setattr(adapter_updates, "REFUSAL_PAUSE_S", 0)

    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            cluster.nodes[1].memory.may_read.clear()
            loading = asyncio.ensure_future(client.load_adapter("sql", "tenants/sql"))
            await until(lambda: SQL.id in cluster.nodes[0].memory.loaded)

            with pytest.raises(BatonError, match="are in progress") as refused:
                await client.unload_adapter("sql")
            assert refused.value.reason == "TOO_MANY_UPDATES"
            cluster.nodes[1].memory.may_read.set()
            await loading

            await client.unload_adapter("sql")

    run_scenario(scenario)


def test_of_loads_of_one_name_at_once_one_is_refused() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            for node in cluster.nodes:
                node.memory.may_read.clear()
            loads = [
                asyncio.ensure_future(client.load_adapter("sql", path))
                for path in ("tenants/sql", "tenants/new")
            ]
            await until(lambda: cluster.nodes[0].registry.counts().num_reading == len(loads))
            for node in cluster.nodes:
                node.memory.may_read.set()

            outcomes = await asyncio.gather(*loads, return_exceptions=True)
            [loaded] = [each[0] for each in outcomes if not isinstance(each, BaseException)]
            [refused] = [each for each in outcomes if isinstance(each, BaseException)]
            assert "already been loaded" in str(refused)
            assert [node.adapters["sql"] for node in cluster.nodes] == [loaded, loaded]

    run_scenario(scenario)


def test_a_node_that_does_not_take_a_name_gets_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_updates, "NAMES_TIMEOUT_S", 0)
    monkeypatch.setattr(adapter_updates, "FIRST_PAUSE_S", 0)

    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            last = cluster.nodes[1]
            last.name_faults += [NodeFailed("not now")] * 3

            assert await client.load_adapter("sql", "tenants/sql") == (SQL, 2)

            assert cluster.table.find_model("sql").adapter == SQL
            await until(lambda: cluster.held == BOTH)
            assert not last.name_faults

    run_scenario(scenario)


def test_more_names_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_updates, "MAX_NAMES", 1)

    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            await client.load_adapter("sql", "tenants/sql")
            with pytest.raises(BatonError, match="1 adapters of tiny have names") as refused:
                await client.load_adapter("chat", "tenants/new")
            assert refused.value.reason == "TOO_MANY_ADAPTERS"

            await client.load_adapter("sql", "tenants/new", can_replace=True)
            await client.unload_adapter("sql")
            await client.load_adapter("chat", "tenants/new")

    run_scenario(scenario)


def test_unlike_files_are_refused_with_the_names_of_the_nodes() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            cluster.nodes[1].write("tenants/sql", "other")

            with pytest.raises(BatonError, match=r"on decode-0; .* on prefill-0\).*copy the same"):
                await client.load_adapter("sql", "tenants/sql")

            assert cluster.held == NONE

    run_scenario(scenario)


def test_a_name_in_use_is_replaced_only_on_request() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            await client.load_adapter("sql", "tenants/sql")
            with pytest.raises(BatonError, match="'sql' has already been loaded"):
                await client.load_adapter("sql", "tenants/new")
            with pytest.raises(BatonError, match="'tiny' is the name of a served model"):
                await client.load_adapter("tiny", "tenants/new", can_replace=True)

            new, _ = await client.load_adapter("sql", "tenants/new", can_replace=True)

            assert new.id == adapter_id("new")
            assert cluster.table.find_model("sql").adapter == new

    run_scenario(scenario)


def test_a_replacement_that_a_node_refuses_leaves_the_old_adapter_on_all_nodes() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            await client.load_adapter("sql", "tenants/sql")
            cluster.nodes[1].delete("tenants/new")

            with pytest.raises(BatonError, match="decode-0"):
                await client.load_adapter("sql", "tenants/new", can_replace=True)

            assert [node.adapters["sql"] for node in cluster.nodes] == [SQL, SQL]
            await cluster.until(lambda: cluster.table.find_model("sql").adapter == SQL)

    run_scenario(scenario)


def test_a_reload_of_a_folder_that_a_node_refuses_leaves_the_old_adapter_on_all_nodes() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            await client.load_adapter("sql", "tenants/sql")
            for node in cluster.nodes:
                node.write("tenants/sql", "newer")
            cluster.nodes[1].memory.faults = [AdapterUnreadable("it is being written")]

            with pytest.raises(BatonError, match="decode-0: it is being written"):
                await client.load_adapter("sql", "tenants/sql", can_replace=True)

            # The files of the old one are gone: it is in memory.
            assert [node.adapters.get("sql") for node in cluster.nodes] == [SQL, SQL]
            for node in cluster.nodes:
                async with node.registry.held(SQL):
                    assert node.memory.loaded[SQL.id] == "old"
            await cluster.until(lambda: cluster.table.find_model("sql").adapter == SQL)

    run_scenario(scenario)


def test_names_paths_and_models_are_checked_before_nodes_are_called() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            for name, path, model, expected in (
                ("", "tenants/sql", "", "both the name and the path"),
                ("sql", "", "", "both the name and the path"),
                ("x" * 257, "tenants/sql", "", "at most 256"),
                ("a\nb", "tenants/sql", "", "not printable"),
                ("sql", "tenants/sql", "other", "'other' is not served here: tiny"),
            ):
                with pytest.raises(BatonError, match=expected):
                    await client.load_adapter(name, path, model=model)
            with pytest.raises(BatonError, match="no adapter 'other' here; served: tiny") as error:
                await client.unload_adapter("other")
            assert error.value.reason == "UNKNOWN_MODEL"
            with pytest.raises(BatonError, match="no adapter 'tiny'"):
                await client.unload_adapter("tiny")

            assert cluster.held == NONE

    run_scenario(scenario)


def test_nodes_without_places_for_adapters_are_refused_with_the_remedy() -> None:
    async def scenario() -> None:
        cards = adapter_cards(max_loras=0)
        async with (
            adapter_cluster(FILES, cards=cards) as cluster,
            operator_client(cluster) as client,
        ):
            with pytest.raises(BatonError, match="start the nodes with --lora-root"):
                await client.load_adapter("sql", "tenants/sql")

    run_scenario(scenario)


def test_the_model_must_be_named_where_several_take_adapters() -> None:
    async def scenario() -> None:
        cards = adapter_cards()
        cards += [
            replace(card, model="b", node_id=NodeId(f"b-{card.node_id}"))
            for card in adapter_cards()
        ]
        async with (
            adapter_cluster(FILES, cards=cards) as cluster,
            operator_client(cluster) as client,
        ):
            with pytest.raises(BatonError, match="adapter: b, tiny"):
                await client.load_adapter("sql", "tenants/sql")

            assert (await client.load_adapter("sql", "tenants/sql", model="b"))[1] == 2

            assert cluster.table.find_model("sql").base == "b"
            with pytest.raises(BatonError, match="name of an adapter of 'b'"):
                await client.load_adapter("sql", "tenants/new", model="tiny", can_replace=True)

    run_scenario(scenario)


@pytest.mark.parametrize("operators", [OPERATORS, NO_OPERATORS], ids=["operators", "no operators"])
def test_a_client_token_does_not_permit_updates(operators: Operators) -> None:
    async def scenario() -> None:
        async with (
            adapter_cluster(FILES, operators=operators, node_operators=operators) as cluster,
            operator_client(cluster, operators, token="client") as client,
        ):
            for call in (client.load_adapter("sql", "tenants/sql"), client.unload_adapter("sql")):
                with pytest.raises(BatonError, match="--operator-token-file") as refusal:
                    await call
                assert refusal.value.reason == "NOT_AN_OPERATOR"
            assert cluster.held == NONE

    run_scenario(scenario)


def test_an_operator_updates_nodes_with_the_same_operators_only() -> None:
    async def scenario() -> None:
        others = Operators(AcceptedTokens(("other",)))
        async with (
            adapter_cluster(FILES, operators=OPERATORS, node_operators=OPERATORS) as cluster,
            operator_client(cluster, OPERATORS, token="client") as client,
        ):
            await client.load_adapter("sql", "tenants/sql", operator_token="operator")
            assert await client.unload_adapter("sql", operator_token="operator") == 2
            assert cluster.held == NONE
        async with (
            adapter_cluster(FILES, operators=OPERATORS, node_operators=others) as cluster,
            operator_client(cluster, OPERATORS, token="operator") as client,
        ):
            with pytest.raises(BatonError, match=r"prefill-0: .*operators") as refusal:
                await client.load_adapter("sql", "tenants/sql")
            assert refusal.value.code is StatusCode.PERMISSION_DENIED

    run_scenario(scenario)
