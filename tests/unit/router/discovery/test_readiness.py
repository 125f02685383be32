"""Readiness of a router."""

from __future__ import annotations

from baton.core.legs import LegKind
from baton.router.discovery.node_reports import PATIENCE_S, Readiness
from baton.router.routing.node_table import NodeTable
from tests.support.node_calls import a_node, a_node_of, an_embedder

PREFILL, DECODE = a_node(LegKind.PREFILL), a_node(LegKind.DECODE)


def test_a_router_becomes_ready_with_both_roles_and_stays_ready_with_decode_alone() -> None:
    table, readiness = NodeTable(), Readiness(wants_prefill=True, now=0.0)
    reported = [readiness.is_ready(table, 1.0)]
    table.join(DECODE.address, DECODE.card)
    reported.append(readiness.is_ready(table, 2.0))
    table.join(PREFILL.address, PREFILL.card)
    reported.append(readiness.is_ready(table, 3.0))
    table.lose(PREFILL.address)
    reported.append(readiness.is_ready(table, 4.0))
    table.lose(DECODE.address)
    reported.append(readiness.is_ready(table, 5.0))
    table.join(DECODE.address, DECODE.card)
    reported.append(readiness.is_ready(table, 6.0))

    assert reported == [False, False, True, True, False, True]


def test_waiting_for_missing_prefill_nodes_times_out() -> None:
    table, readiness = NodeTable(), Readiness(wants_prefill=True, now=7.0)
    table.join(DECODE.address, DECODE.card)

    assert not readiness.is_ready(table, 7.0 + PATIENCE_S - 1)
    assert readiness.is_ready(table, 7.0 + PATIENCE_S)


def test_without_prefill_sources_decode_nodes_suffice() -> None:
    table, readiness = NodeTable(), Readiness(wants_prefill=False, now=0.0)
    table.join(DECODE.address, DECODE.card)

    assert readiness.is_ready(table, 0.0)


def test_a_model_that_only_embeds_needs_no_decode_nodes() -> None:
    table, readiness = NodeTable(), Readiness(wants_prefill=True, now=0.0)
    embedder = an_embedder()
    table.join(embedder.address, embedder.card)
    reported = [readiness.is_ready(table, 0.0)]
    table.lose(embedder.address)
    reported.append(readiness.is_ready(table, 1.0))
    table.join(DECODE.address, DECODE.card)
    reported.append(readiness.is_ready(table, 2.0))

    assert reported == [True, False, False]


def test_each_of_several_models_needs_a_node_at_start() -> None:
    models = ["chat", "small"]
    table = NodeTable()
    readiness = Readiness(wants_prefill=True, now=0.0, models=models)
    late = Readiness(wants_prefill=True, now=0.0, models=models)
    small = a_node_of("small", LegKind.PREFILL, vector_size=4, generates=False)
    table.join(small.address, small.card)
    assert not readiness.is_ready(table, 0.0)
    for role in (LegKind.PREFILL, LegKind.DECODE):
        node = a_node_of("chat", role)
        table.join(node.address, node.card)
    assert readiness.is_ready(table, 1.0)

    table.lose(small.address)

    assert readiness.is_ready(table, 2.0)
    assert not late.is_ready(table, PATIENCE_S - 1)
    assert late.is_ready(table, PATIENCE_S)


def test_of_several_models_one_that_generates_needs_a_decode_node_at_start() -> None:
    table = NodeTable()
    readiness = Readiness(wants_prefill=True, now=0.0, models=["chat", "small"])
    for node in (
        a_node_of("small", LegKind.PREFILL, vector_size=4, generates=False),
        a_node_of("chat", LegKind.PREFILL, vector_size=4),
    ):
        table.join(node.address, node.card)
    reported = [readiness.is_ready(table, 1.0)]
    decode = a_node_of("chat", LegKind.DECODE)
    table.join(decode.address, decode.card)
    reported.append(readiness.is_ready(table, 2.0))

    assert reported == [False, True]


def test_a_model_that_generates_may_have_nodes_that_embed_alone() -> None:
    table = NodeTable()
    readiness = Readiness(wants_prefill=True, now=0.0, models=["chat", "vectors"])
    for node in (
        a_node_of("vectors", LegKind.PREFILL, vector_size=4),
        *(a_node_of("chat", role) for role in (LegKind.PREFILL, LegKind.DECODE)),
    ):
        table.join(node.address, node.card)

    assert readiness.is_ready(table, 1.0)


def test_waiting_for_missing_decode_nodes_times_out_if_the_model_embeds() -> None:
    table, readiness = NodeTable(), Readiness(wants_prefill=True, now=0.0)
    generating = a_node_of("large", LegKind.PREFILL)
    table.join(generating.address, generating.card)
    assert not readiness.is_ready(table, PATIENCE_S)

    both = a_node_of("small", LegKind.PREFILL, vector_size=4)
    table.join(both.address, both.card)

    assert not readiness.is_ready(table, PATIENCE_S - 1)
    assert readiness.is_ready(table, PATIENCE_S)
