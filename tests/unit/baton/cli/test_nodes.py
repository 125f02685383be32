from __future__ import annotations

from dataclasses import replace

from baton.cli.commands.adapters import table_of_adapters
from baton.cli.commands.nodes import as_values, table_of_tiers, tables_of
from baton.client.node_status import Snapshot, adapters_of
from baton.core.ids import AdapterRef
from baton.core.legs import LegKind
from baton.rpc.adapters import LoadedAdapter, NameOrder, NodeAdapters
from baton.rpc.node_info import (
    STATUS,
    NodeAvailability,
    NodeStatus,
    NodeTotals,
    TierReport,
)

HOST = TierReport("host", 10, 20480, 40960, 160, 12, 30, 2, 1)
OBJECT = TierReport("object", 900, 5 << 30, 1 << 40, 64, 4, 900, 0, 3)
TOTALS = NodeTotals(num_prompt_tokens=320, num_hit_tokens=240, tiers=(HOST, OBJECT))
LOADED = LoadedAdapter("1" * 64, "a/sql", 1 << 20, 3)


def snapshot_of(totals: NodeTotals) -> Snapshot:
    return Snapshot(1.0, (a_status(totals),))


def a_status(totals: NodeTotals) -> NodeStatus:
    return NodeStatus((LegKind.PREFILL,), "n:1", NodeAvailability.READY, node_id="n", totals=totals)


def test_totals_and_tiers_round_trip_through_protobuf() -> None:
    status = a_status(TOTALS)
    assert STATUS.from_message(STATUS.to_message(status)) == status


def test_each_tier_has_a_row_with_its_usage_and_its_share_of_prompt_tokens() -> None:
    table = table_of_tiers(snapshot_of(TOTALS))
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["tier"] == ["host", "object"]
    assert columns["used"] == ["20.0 KiB of 40.0 KiB", "5.0 GiB of 1024.0 GiB"]
    assert columns["hit rate"] == ["50%", "20%"]
    assert columns["blocks"] == ["10", "900"]
    assert [columns[name] for name in ("loaded", "stored", "evicted", "failed")] == [
        *(["12", "4"], ["30", "900"], ["2", "0"], ["1", "3"])
    ]


def test_nodes_without_tiers_have_no_tier_table() -> None:
    assert len(tables_of(snapshot_of(NodeTotals()), {})) == 1
    assert len(tables_of(snapshot_of(TOTALS), {})) == 2


def test_accepted_drafts_are_shown_with_their_first_positions() -> None:
    totals = replace(
        TOTALS,
        num_proposed_tokens=30,
        num_accepted_tokens=15,
        proposed_by_position=(20, 10),
        accepted_by_position=(15,),
    )
    [table] = tables_of(snapshot_of(replace(totals, tiers=())), {})
    columns = {str(column.header): list(column.cells) for column in table.columns}

    assert columns["drafts accepted"] == ["50% (75 0)"]
    status = a_status(totals)
    assert STATUS.from_message(STATUS.to_message(status)) == status


def test_json_output_contains_the_tiers() -> None:
    (node,) = as_values(snapshot_of(TOTALS), {})["nodes"]
    assert [tier["num_bytes"] for tier in node["tiers"]] == [20480, 5 << 30]


def test_nodes_with_adapters_show_how_many_are_in_memory() -> None:
    sql, chat = AdapterRef("sql", "1" * 64, "a/sql"), AdapterRef("chat", "2", "a/chat")
    adapters = NodeAdapters((NameOrder("chat", 1, chat), NameOrder("sql", 2, sql)), (LOADED,))
    serving = replace(a_status(NodeTotals()), adapters=adapters, max_loras=8)
    other = replace(a_status(NodeTotals()), address="m:1")

    seen = Snapshot(1.0, (serving, other))
    (table,) = tables_of(seen, {})
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["adapters"] == ["1/2 (batch: 8)", ""]
    assert as_values(seen, {})["nodes"][0]["adapters"]["in_memory"][0]["num_bytes"] == 1 << 20

    (plain,) = tables_of(Snapshot(1.0, (other,)), {})
    assert "adapters" not in {str(column.header) for column in plain.columns}


def test_nodes_that_encode_pictures_show_the_rows_in_memory() -> None:
    encoding = a_status(NodeTotals(num_encoder_rows=32, max_encoder_rows=128))
    other = replace(a_status(NodeTotals()), address="m:1")
    assert STATUS.from_message(STATUS.to_message(encoding)) == encoding

    seen = Snapshot(1.0, (encoding, other))
    (table,) = tables_of(seen, {})
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["encoder rows"] == ["32/128", ""]
    assert as_values(seen, {})["nodes"][0]["max_encoder_rows"] == 128

    (plain,) = tables_of(Snapshot(1.0, (other,)), {})
    assert "encoder rows" not in {str(column.header) for column in plain.columns}


def test_vllm_servers_that_are_not_used_show_the_reason() -> None:
    server = NodeStatus(
        (LegKind.PREFILL,),
        "vllm://v:8000",
        NodeAvailability.MISMATCHED,
        node_id="vllm",
        num_running=2,
        reason="d:1: other weights",
    )
    assert STATUS.from_message(STATUS.to_message(server)) == server
    (table,) = tables_of(Snapshot(1.0, (server, a_status(NodeTotals()))), {})
    columns = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    assert columns["state"] == ["mismatched", "ready"]
    assert columns["running"] == ["2", "0"]
    assert columns["reason"] == ["d:1: other weights", ""]

    (plain,) = tables_of(snapshot_of(NodeTotals()), {})
    assert "reason" not in {str(column.header) for column in plain.columns}


def test_nodes_of_a_model_with_different_kernels_are_noted() -> None:
    first = replace(a_status(NodeTotals()), model="tiny", kernels="avx2")
    second = replace(first, address="m:1", kernels="torch")
    other = replace(first, address="o:1", model="large", kernels="amx")
    assert STATUS.from_message(STATUS.to_message(second)) == second

    (mixed,) = tables_of(Snapshot(1.0, (first, second, other)), {})
    (alike,) = tables_of(Snapshot(1.0, (first, other)), {})

    columns = {str(column.header): list(column.cells) for column in mixed.columns}
    assert columns["kernels"] == ["avx2", "torch", "amx"]
    assert mixed.caption == "tiny: tokens can differ between nodes with kernels avx2 and torch"
    assert alike.caption is None


def test_nodes_of_several_processes_are_noted() -> None:
    first = replace(a_status(NodeTotals()), model="tiny", kernels="avx2")
    second = replace(first, address="m:1", num_ranks=2)

    (mixed,) = tables_of(Snapshot(1.0, (first, second)), {})

    assert mixed.caption is not None
    assert "kernels avx2 and avx2 in 2 processes" in mixed.caption


def test_adapters_are_listed_once_for_all_nodes() -> None:
    sql, chat = AdapterRef("sql", "1" * 64, "a/sql"), AdapterRef("chat", "2" * 64, "a/chat")
    first = NodeAdapters((NameOrder("chat", 1, chat), NameOrder("sql", 2, sql)), (LOADED,))
    second = NodeAdapters((NameOrder("sql", 2, sql), NameOrder("old", 3)), (LOADED,))
    # Read for a request, by a node that does not know the name yet.
    third = NodeAdapters((), (LOADED,))
    nodes = [
        replace(a_status(NodeTotals()), model="tiny", adapters=adapters)
        for adapters in (first, second, third)
    ]

    table = table_of_adapters(adapters_of(nodes))

    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [
        ("chat", "tiny", "a/chat", "222222222222", "0 of 1 node", ""),
        ("sql", "tiny", "a/sql", "111111111111", "3 of 3 nodes", "1.0 MiB"),
    ]
