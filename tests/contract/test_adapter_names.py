"""Names of adapters that routers learn from nodes, and that nodes get, or lose, when they join."""

from __future__ import annotations

import pytest

from baton.client import BatonError
from baton.core.ids import AdapterRef, ModelVariant
from baton.node.adapters.config import AdapterFolder
from tests.support.adapter_nodes import (
    adapter_cluster,
    adapter_id,
    operator_client,
    run_scenario,
)
from tests.support.waits import until

FILES = {"tenants/sql": "old", "tenants/new": "new"}
SQL = AdapterRef("sql", adapter_id("old"), "tenants/sql")


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
            await cluster.nodes[0].load("sql", "tenants/sql")

            await cluster.until(lambda: cluster.table.find_model("sql").adapter == SQL)

    run_scenario(scenario)


def test_a_node_that_joins_gets_the_names_of_the_others_again() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            await client.load_adapter("sql", "tenants/sql")
            returned = cluster.lose("decode-0")
            returned.restart()
            assert cluster.held["decode-0"] == set()

            cluster.join(returned)

            await until(lambda: returned.adapters == {"sql": SQL})

    run_scenario(scenario)


def test_a_node_that_joins_follows_the_orders_that_it_has_missed() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            for name in ("sql", "kept", "again"):
                await client.load_adapter(name, "tenants/sql")
            returned = cluster.lose("decode-0")
            for name in ("sql", "again"):
                await client.unload_adapter(name)
            await client.load_adapter("again", "tenants/new")
            assert "sql" in returned.adapters

            cluster.join(returned)

            assert "sql" not in cluster.table.served.variants
            await until(lambda: returned.adapters.keys() == {"kept", "again"})
            await until(lambda: returned.adapters["again"].id == adapter_id("new"))

    run_scenario(scenario)


def test_an_unload_holds_for_nodes_that_join_later_whatever_the_others_have() -> None:
    async def scenario() -> None:
        async with adapter_cluster(FILES) as cluster, operator_client(cluster) as client:
            later = cluster.lose("decode-0")
            await later.load("sql", "tenants/sql")
            with pytest.raises(BatonError, match="no adapter 'sql'"):  # none that is known
                await client.unload_adapter("sql")
            cluster.join(later)
            await until(lambda: later.adapters == {})
            # A report on its way would pass for one of the process that is started next.
            address = cluster.addresses["decode-0"]
            await until(lambda: not cluster.table.adapters.at(address).reported.named)

            # Nodes have the name from their start: that is older than any order.
            cluster.lose("decode-0")
            later.restart(AdapterFolder("sql", later.root / "tenants/sql"))
            cluster.join(later)
            assert "sql" not in cluster.table.served.variants
            await until(lambda: later.adapters == {})

    run_scenario(scenario)
