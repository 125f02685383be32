"""Node table: limits and defaults of models, as nodes join and leave."""

from __future__ import annotations

from dataclasses import replace

from baton.core.ids import ModelVariant, NodeId
from baton.core.legs import LegKind
from baton.core.sampling import NO_SAMPLING_DEFAULTS, SamplingDefaults
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import ServedModel
from tests.support.node_calls import a_card, other_layout


def test_limits_and_defaults_of_a_model_follow_its_nodes() -> None:
    table, cool = NodeTable(), SamplingDefaults(temperature=0.5)
    tiny = ModelVariant("tiny")
    card = replace(a_card(LegKind.DECODE, "d"), max_model_len=100, max_sequence_len=50)
    other = replace(card, model="other", max_model_len=200, max_sequence_len=20)

    table.join("p:1", replace(a_card(LegKind.PREFILL, "p"), sampling_defaults=cool))
    assert table.served_model(tiny) == ServedModel(cool, has_prefill_nodes=True)

    table.join("d:1", card)
    table.join("d:2", replace(card, max_model_len=90, max_sequence_len=40))
    table.join("o:1", other)
    assert set(table.models) == {"tiny", "other"}
    assert table.find_model("tiny") == tiny
    assert table.served_model(tiny) == ServedModel(
        cool, 100, 40, has_decode_nodes=True, has_prefill_nodes=True
    )
    assert table.served_model(table.find_model("other")) == ServedModel(
        NO_SAMPLING_DEFAULTS, 200, 20, has_decode_nodes=True
    )
    assert table.served_model() == ServedModel(cool, 200, 20, has_prefill_nodes=True)

    table.lose("d:2")
    table.lose("p:1")
    assert table.served_model(tiny) == ServedModel(
        NO_SAMPLING_DEFAULTS, 100, 50, has_decode_nodes=True
    )

    table.join("d:1", other)  # the address serves another model now
    assert set(table.models) == {"other"}
    assert table.served_model(tiny) == ServedModel()


def test_a_node_that_requires_block_conversion_is_paired_if_there_is_no_other() -> None:
    table = NodeTable()
    prefill, decode = a_card(LegKind.PREFILL, "p"), a_card(LegKind.DECODE, "d")
    small = other_layout(block_size=decode.fingerprint.layout.block_size // 2)
    other = replace(decode, fingerprint=small, block_bytes=decode.block_bytes // 2)
    table.join("p:1", prefill)
    table.join("d:1", other)

    assert prefills_by_decode(table) == {"d": []}

    staging = replace(other, kv_staging_bytes=prefill.block_bytes)
    table.join("d:1", staging)
    assert prefills_by_decode(table) == {"d": ["p"]}
    [pair] = [group for group in table.groups() if group.decodes]
    assert table.pairs_with(pair.decodes[0]) == [(pair.decodes[0], pair.prefills[0])]

    table.join("d:1", replace(staging, kv_transport="ucxx"))
    assert prefills_by_decode(table) == {"d": []}

    table.join("d:1", staging)
    equal = replace(prefill, node_id=NodeId("q"), fingerprint=small, block_bytes=other.block_bytes)
    table.join("q:1", equal)
    assert prefills_by_decode(table) == {"d": ["q"]}


def prefills_by_decode(table: NodeTable) -> dict[str, list[str]]:
    return {
        decode.card.node_id: [prefill.card.node_id for prefill in group.prefills]
        for group in table.groups()
        for decode in group.decodes
    }
