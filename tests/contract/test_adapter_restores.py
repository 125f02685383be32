"""Names of adapters that routers learn from nodes, and that nodes get, or lose, when they join."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.client import BatonError
from baton.core.ids import AdapterRef, Incarnation, ModelVariant
from baton.rpc.node_info import NodeCard
from tests.support.adapter_nodes import (
    adapter_cluster,
    adapter_id,
    operator_client,
    run_scenario,
)

FILES = {"tenants/sql": "old", "tenants/new": "new"}
SQL = AdapterRef("sql", adapter_id("old"), "tenants/sql")
NONE: dict[str, set[str]] = {"prefill-0": set(), "decode-0": set()}


def test_a_name_is_served_while_a_node_has_it() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            await client.load_adapter("sql", "tenants/sql")
            cluster.table.lose(cluster.node("prefill-0").address)
            assert cluster.table.find_model("sql").adapter == SQL

            cluster.table.lose(cluster.node("decode-0").address)
            assert cluster.table.find_model("sql") == ModelVariant("sql")
            # The unload would be forgotten when a node joins.
            with pytest.raises(BatonError, match="no node has joined"):
                await client.unload_adapter("sql")

    run_scenario(scenario)


def test_a_new_router_learns_the_adapters_from_its_nodes() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster:
            await cluster.nodes[0].registry.load("sql", "tenants/sql")

            await cluster.until(lambda: cluster.table.find_model("sql").adapter == SQL)

    run_scenario(scenario)


def test_a_node_that_joins_gets_the_names_of_the_others_again() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            await client.load_adapter("sql", "tenants/sql")
            returned = cluster.nodes[1]
            address = cluster.node("decode-0").address
            cluster.table.lose(address)
            returned.registry.unload("sql")  # as by a restart
            assert cluster.held["decode-0"] == set()

            cluster.table.join(address, returned.card)
            cluster.updates.handle_reports()

            await cluster.until(lambda: SQL in cluster.table.adapters.at(address).refs)
            assert returned.adapters == {"sql": SQL}

            await client.unload_adapter("sql")
            cluster.updates.handle_reports()
            assert cluster.held == NONE

    run_scenario(scenario)


def test_a_node_that_returns_unloads_what_was_unloaded_meanwhile() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            returned = cluster.nodes[1]
            address = cluster.node("decode-0").address

            def leave() -> None:
                cluster.table.lose(address)
                cluster.updates.handle_reports()

            def join(card: NodeCard) -> None:
                cluster.table.join(address, card)
                cluster.updates.handle_reports()

            for name in ("sql", "kept", "again"):
                await client.load_adapter(name, "tenants/sql")
            leave()
            for name in ("sql", "again"):
                await client.unload_adapter(name)
            await client.load_adapter("again", "tenants/new")
            assert "sql" in returned.adapters
            join(returned.card)
            await cluster.until(lambda: returned.adapters.keys() == {"kept", "again"})
            assert cluster.table.served.variants.keys() >= {"kept", "again"}
            await cluster.until(lambda: returned.adapters["again"].id == adapter_id("new"))

            # Another process has missed nothing, whatever it serves from its start.
            leave()
            await client.unload_adapter("kept")
            join(replace(returned.card, incarnation=Incarnation("next")))
            await client.load_adapter("last", "tenants/sql")
            assert returned.adapters.keys() == {"kept", "again", "last"}

    run_scenario(scenario)
