"""Node table: limits and defaults of models, as nodes join and leave."""

from __future__ import annotations

from dataclasses import replace

from engine.sampling import NO_SAMPLING_DEFAULTS, SamplingDefaults
from router.routing.node_table import NodeTable, ServedModel
from rpc.node_info import NodeRole
from tests.support.node_calls import a_card


def test_limits_and_defaults_of_a_model_follow_its_nodes() -> None:
    table, cool = NodeTable(), SamplingDefaults(temperature=0.5)
    card = replace(a_card(NodeRole.DECODE, "d"), max_model_len=100, max_sequence_len=50)
    other = replace(card, model="other", max_model_len=200, max_sequence_len=20)

    table.join("p:1", replace(a_card(NodeRole.PREFILL, "p"), sampling_defaults=cool))
    assert table.served_model("tiny") == ServedModel(cool)

    table.join("d:1", card)
    table.join("d:2", replace(card, max_model_len=90, max_sequence_len=40))
    table.join("o:1", other)
    assert table.models == {"tiny", "other"}
    assert table.served_model("tiny") == ServedModel(cool, 100, 40)
    assert table.served_model("other") == ServedModel(NO_SAMPLING_DEFAULTS, 200, 20)
    assert table.served_model("") == ServedModel(cool, 200, 20)

    table.lose("d:2")
    table.lose("p:1")
    assert table.served_model("tiny") == ServedModel(NO_SAMPLING_DEFAULTS, 100, 50)

    table.join("d:1", other)  # the address serves another model now
    assert table.models == {"other"}
    assert table.served_model("tiny") == ServedModel()
