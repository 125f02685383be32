"""Requests of an SMG gateway to a node, as requests of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import NamedError
from baton.core.ids import HandoffId, NodeId, Peer
from baton.core.legs import LegKind
from baton.core.request import ReceiveKv
from baton.core.structured_outputs import StructuredOutputs
from tests.support.node_calls import a_card

pytest.importorskip("smg_grpc_proto", reason="needs baton[smg]")
from smg_grpc_proto.generated import sglang_scheduler_pb2

from baton.node.smg.request import requests_from

PAIR = {"bootstrap_host": "10.0.0.5", "bootstrap_port": 50061, "bootstrap_room": 7}
DECODE, PREFILL = a_card(LegKind.DECODE), a_card(LegKind.PREFILL)


def a_message(**fields: Any) -> Any:
    given = {"request_id": "a", "tokenized": {"input_ids": [3, 4]}, **fields}
    return sglang_scheduler_pb2.GenerateRequest(**given)


def test_both_nodes_of_a_pair_name_the_same_hand_off() -> None:
    message = a_message(disaggregated_params=PAIR, sampling_params={"n": 2})
    sends = requests_from(message, PREFILL, 1.0, seed=99)
    receives = requests_from(message, DECODE, 1.0, seed=98)
    address = "10.0.0.5:50061"
    for index, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        handoff_id = HandoffId(f"smg-7-a-{index}", 1)
        assert (send.send_to, send.receive_from) == (handoff_id, None)
        assert receive.receive_from == ReceiveKv(handoff_id, Peer(NodeId(address), address))
        assert send.seed == receive.seed == 7 + index
        assert send.sampling == receive.sampling


def test_omitted_parameters_have_defaults() -> None:
    [alone] = requests_from(a_message(), DECODE, 1.0, seed=99)
    assert (alone.receive_from, alone.seed, alone.prompt_token_ids) == (None, 99, (3, 4))
    sampling = alone.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.0, 1.0, 1.0)
    assert (sampling.max_tokens, sampling.logprobs) == (510, None)


def test_parameters_are_passed_on() -> None:
    message = a_message(
        return_logprob=True,
        logprob_start_len=-1,
        top_logprobs_num=2,
        sampling_params={
            "temperature": 0.5,
            "top_k": -1,
            "max_new_tokens": 9,
            "min_new_tokens": 2,
            "logit_bias": {"5": -1.0},
            "stop": ["left to the gateway"],
            "ebnf_grammar": 'root ::= "a"',
        },
    )
    [request] = requests_from(message, DECODE, 1.0, seed=0)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.logit_bias) == (0.5, 0, {5: -1.0})
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 2)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, None)
    assert sampling.structured_outputs == StructuredOutputs(grammar='root ::= "a"')


@pytest.mark.parametrize(
    ("name", "card", "fields"),
    [
        ("disaggregated_params is missing", PREFILL, {}),
        ("port 0", DECODE, {"disaggregated_params": {**PAIR, "bootstrap_port": 0}}),
        ("no prefill node is at ''", DECODE, {"disaggregated_params": {"bootstrap_port": 1}}),
        ("lora_id", DECODE, {"lora_id": "x"}),
        ("mm_inputs", DECODE, {"mm_inputs": {"image_urls": ["x"]}}),
        ("input_embeds", DECODE, {"input_embeds": [0.5]}),
        ("return_hidden_states", DECODE, {"return_hidden_states": True}),
        ("custom_logit_processor", DECODE, {"custom_logit_processor": "x"}),
        ("token_ids_logprob", DECODE, {"token_ids_logprob": [1]}),
        ("data_parallel_rank", DECODE, {"data_parallel_rank": 1}),
        ("logprob_start_len", DECODE, {"return_logprob": True, "logprob_start_len": 1}),
        ("logit_bias", DECODE, {"sampling_params": {"logit_bias": {"x": 1.0}}}),
        ("logit_bias", DECODE, {"sampling_params": {"logit_bias": {"1" * 4301: 1.0}}}),
        ("logit_bias", DECODE, {"sampling_params": {"logit_bias": {str(1 << 31): 1.0}}}),
        ("n is 129", DECODE, {"sampling_params": {"n": 129}}),
        ("no tokens", DECODE, {"tokenized": {"input_ids": []}}),
        ("context length", DECODE, {"tokenized": {"input_ids": [1] * 512}}),
        ("request_id", DECODE, {"request_id": "x" * 257}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, card: Any, fields: dict[str, Any]
) -> None:
    with pytest.raises(NamedError, match=name):
        requests_from(a_message(**fields), card, 1.0, seed=0)
