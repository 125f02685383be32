"""Conversion of values to messages and back, over serialized bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.struct_pb2 import NULL_VALUE, ListValue, Struct, Value

from baton.client.generation import Generation
from baton.client.messages import request_from
from baton.core.errors import InvalidRequest
from baton.core.ids import AdapterRef, BlockId, HandoffId, Incarnation, NodeId, Peer, RequestId
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.legs import LegKind
from baton.core.output import Failure, FinishReason, FirstToken, Output, TokenLogprobs
from baton.core.request import EMBED, PREFETCH, TOKEN_EMBED, EngineRequest, PrefixSource, ReceiveKv
from baton.core.sampling import MAX_BANNED_SEQUENCES, SamplingDefaults, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.kv_transfer.errors import InvalidMessage, PeerUnreachable
from baton.kv_transfer.protocol.messages import (
    Closed,
    Done,
    Failed,
    Grant,
    Hello,
    LinkMessage,
    Region,
    Renew,
    Renewed,
    Revoked,
    RevokeGrant,
    Writing,
    decode_done,
    note_of,
)
from baton.node.kv.link import NAME_BY_KIND, link_message_from, link_message_to
from baton.router.doors.grpc.translate import calls_from
from baton.router.values import TextPrompt
from baton.rpc.adapters import NO_ADAPTERS, LoadedAdapter, NameOrder, NodeAdapters
from baton.rpc.errors import EmptyPrompt, UnsupportedInput
from baton.rpc.messages.calls import (
    engine_request,
    handoff_id_of,
    leg_order,
    node_request_id,
)
from baton.rpc.messages.conversion import SAMPLING, output_from, output_to, sampling_from
from baton.rpc.node_info import (
    CARD,
    LOAD,
    NodeLoad,
    adapters_from,
    update_to,
)
from baton.v1 import inference_pb2, kv_link_pb2, node_pb2, sampling_pb2
from tests.support.node_calls import FINGERPRINT, a_card

HANDOFF = HandoffId("r", 3)
LOGPROBS = TokenLogprobs(7, -0.5, 2, ((9, -0.25), (7, -0.5)))
LINK_MESSAGES: list[LinkMessage] = [
    Hello(
        NodeId("d"),
        Incarnation("abc"),
        FINGERPRINT,
        Region(2**47 + 5, 1000, 65536, "cuda:0"),
        "nixl",
        b"\x00\xff",
    ),
    Grant(HANDOFF, 2**40, 3, (BlockId(5), BlockId(2)), 5.0),
    Grant(HANDOFF, 2**40, 0, (BlockId(5), BlockId(2)), 5.0, (b"\x00" * 16, b"\xff" * 17)),
    Renew((HANDOFF, HandoffId("s", 1)), 2.5),
    Renewed((HANDOFF,)),
    Writing(HANDOFF, num_written=3),
    Writing(HANDOFF, num_written=3, digest=0),
    RevokeGrant(HANDOFF, 9),
    Revoked(HANDOFF),
    Done(HANDOFF, 77, FirstToken(7, LOGPROBS, bytes(range(256))), 2**64 - 1),
    Done(HANDOFF, 77, FirstToken(0), 0),
    Done(HANDOFF, 77, FirstToken(0), None),
    Done(HANDOFF, 77, None, 5),
    Failed(HANDOFF, "no room"),
    Closed("the node is closing"),
]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.0, seed=0, logprobs=0, prompt_logprobs=0, ignore_eos=True),
    SamplingParams(
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        logit_bias={3: 1.5},
        allowed_token_ids=(1, 2),
        banned_token_ids=(4,),
        banned_sequences=((4, 5), (6,)),
        extra_args={"a": 1, "b": 0.5, "c": True, "d": "word", "e": (1, "two")},
        stop_token_ids=(5, 6),
        seed=2**64 - 1,
        logprobs=3,
        prompt_logprobs=2,
    ),
    SamplingParams(structured_outputs=StructuredOutputs(json="{}", disable_any_whitespace=True)),
    SamplingParams(structured_outputs=StructuredOutputs(json_object=True)),
    SamplingParams(structured_outputs=StructuredOutputs(regex="")),
    SamplingParams(structured_outputs=StructuredOutputs(choice=("é", "b"))),
    SamplingParams(structured_outputs=StructuredOutputs(grammar="start: A")),
]


@pytest.mark.parametrize("message", LINK_MESSAGES, ids=lambda message: type(message).__name__)
def test_link_messages_round_trip_through_protobuf(message: LinkMessage) -> None:
    wire = link_message_to(message).SerializeToString()

    assert link_message_from(kv_link_pb2.LinkMessage.FromString(wire)) == message


DONES = [message for message in LINK_MESSAGES if isinstance(message, Done)]


@pytest.mark.parametrize("done", DONES, ids=lambda done: str(done.digest))
def test_done_round_trips_through_a_notification(done: Done) -> None:
    assert decode_done(note_of(done)) == done


@pytest.mark.parametrize(
    "note",
    [
        b"\xff",
        b"7",
        b"[]",
        b"null",
        b'["r", 0, 5, null, 7, null]',
        b'["r", true, 5, null, 7, null, ""]',
        b'["r", 0, 5.5, null, 7, null, ""]',
        b'[["r"], 0, 5, null, 7, null, ""]',
        b'["r", 0, 5, "x", 7, null, ""]',
        b'["r", 0, 5, null, 7, [1, 2, 3, 4], ""]',
        b'["r", 0, 5, null, 7, [1, -0.5, 3, [[1]]], ""]',
        b'["r", 0, 5, null, 7, null, 5]',
        b'["r", 0, 5, null, 7, null, "*"]',
        b"[" * 100_000,
    ],
    ids=range(14),
)
def test_a_notification_without_a_valid_done_is_a_named_error(note: bytes) -> None:
    with pytest.raises(PeerUnreachable, match="cannot be read"):
        decode_done(note)


@pytest.mark.parametrize(
    ("names", "first_block", "error"),
    [
        ((b"a",), 0, "1 names for 2 blocks"),
        ((b"a", b"b" * 33), 0, "a block name of 33 bytes"),
        ((b"a", b"b"), 1, "a pull from block 1 on"),
        ((b"a",) * 1025, 0, "a pull of 1025 blocks; the limit is 1024"),
    ],
)
def test_an_invalid_pull_is_a_named_error(
    names: tuple[bytes, ...], first_block: int, error: str
) -> None:
    with pytest.raises(InvalidMessage, match=error):
        Grant(HANDOFF, 1, first_block, (BlockId(5), BlockId(2)), 5.0, names)


def test_every_kind_of_link_message_is_tested() -> None:
    assert {type(message) for message in LINK_MESSAGES} == set(NAME_BY_KIND)


def test_unknown_messages_of_a_newer_peer_are_ignored() -> None:
    assert link_message_from(kv_link_pb2.LinkMessage()) is None


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampling_params_round_trip_through_protobuf(sampling: SamplingParams) -> None:
    wire = SAMPLING.to_message(sampling).SerializeToString()

    assert sampling_from(sampling_pb2.SamplingParams.FromString(wire)) == sampling


def test_omitted_fields_take_the_defaults() -> None:
    assert sampling_from(sampling_pb2.SamplingParams()) == SamplingParams()


def test_an_invalid_sampling_value_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="top_p"):
        sampling_from(sampling_pb2.SamplingParams(top_p=0.0))


def test_omitted_sampling_params_take_the_model_defaults() -> None:
    advised = SamplingDefaults(temperature=0.6, top_k=20)
    chosen = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=3)

    assert sampling_from(chosen, advised) == SamplingParams(3, temperature=0.0, top_k=20)


def test_given_sampling_params_override_the_model_defaults() -> None:
    some = Generation({"max_tokens": 3, "temperature": 0.0, "allowed_token_ids": (1, 2)})
    request = request_from("a", some)
    wire = inference_pb2.GenerateRequest.FromString(request.SerializeToString())

    [call] = calls_from(wire, "r", SamplingDefaults(temperature=0.6, top_p=0.9))

    expected = SamplingParams(3, temperature=0.0, top_p=0.9, allowed_token_ids=(1, 2))
    assert call.sampling == expected
    [whole] = calls_from(
        request_from("a", Generation(SamplingParams())), "r", SamplingDefaults(0.6)
    )
    assert whole.sampling == SamplingParams()


@pytest.mark.parametrize("hints", [NO_KV_HINTS, KvHints("s", 9.5, 0), KvHints(release=True)])
def test_hints_of_a_client_reach_the_router(hints: KvHints) -> None:
    request = request_from("a", Generation(kv_hints=hints))
    wire = inference_pb2.GenerateRequest.FromString(request.SerializeToString())

    assert calls_from(wire, "r")[0].kv_hints == hints


@pytest.mark.parametrize("wrong", [{"temprature": 1.0}, {"top_k": "many"}, {"seed": -1}])
def test_sampling_that_cannot_be_sent_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        request_from("a", Generation(wrong))


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_outputs_round_trip_through_protobuf(reason: FinishReason | None) -> None:
    output = Output(
        RequestId("r#3"),
        4,
        (7, 0),
        logprobs=(LOGPROBS, LOGPROBS),
        prompt_logprobs=(None, LOGPROBS),
        finish_reason=reason,
        stop_token_id=0,
        failure=Failure("why"),
    )

    wire = output_to(output).SerializeToString()

    assert output_from(node_pb2.TokenOutput.FromString(wire), RequestId("r#3")) == output


def test_a_node_gets_the_sequence_it_was_sent() -> None:
    alone = EngineRequest(
        request_id=RequestId("r#3"),
        prompt_token_ids=(1, 2),
        sampling=SAMPLINGS[2],
        seed=2**63 - 1,
        age_s=2.5,
        priority=-4,
        cache_salt="salt",
        tenant="owner",
        client="0123456789abcdef",
        kv_hints=KvHints("session", 30.5, 0),
        prior_output_token_ids=(4, 3),
        is_paced=True,
        adapter=AdapterRef("sql", "0123", "tenants/sql"),
    )
    sender = replace(alone, send_to=HANDOFF)
    receiver = replace(alone, receive_from=ReceiveKv(HANDOFF, Peer(NodeId("p"), "host:1")))
    puller = replace(sender, prefix_source=PrefixSource(Peer(NodeId("d"), "host:2"), 96))

    assert engine_request(leg_order(LegKind.PREFILL, sender), 1.5) == _arrived(sender)
    assert engine_request(leg_order(LegKind.PREFILL, puller), 1.5) == _arrived(puller)
    assert engine_request(leg_order(LegKind.DECODE, receiver), 1.5) == _arrived(receiver)
    assert engine_request(leg_order(LegKind.DECODE, alone), 1.5) == _arrived(alone)
    prefetch = replace(alone, task=PREFETCH, kv_hints=KvHints(prefetch=True))
    assert engine_request(leg_order(LegKind.PREFILL, prefetch), 1.5) == _arrived(prefetch)
    for task in (EMBED, replace(EMBED, second_text_start=1), TOKEN_EMBED):
        embed = replace(alone, task=task)
        assert engine_request(leg_order(LegKind.PREFILL, embed), 1.5) == _arrived(embed)


def _arrived(request: EngineRequest) -> EngineRequest:
    """Return the request as its node receives it, with its arrival time."""
    return replace(request, arrival_s=1.5)


def test_the_hand_off_of_a_request_is_in_its_id() -> None:
    awkward = HandoffId("a#2.b", 7)

    assert handoff_id_of(node_request_id(awkward)) == awkward


@pytest.mark.parametrize("age_s", [-1.0, math.nan, math.inf])
def test_an_invalid_age_counts_as_zero(age_s: float) -> None:
    order = leg_order(
        LegKind.PREFILL, EngineRequest(RequestId("r#3"), (1,), SamplingParams(), 0, age_s=age_s)
    )

    assert engine_request(order, 0.0).age_s == 0.0


def test_nodes_refuse_stop_strings() -> None:
    order = leg_order(LegKind.PREFILL, EngineRequest(RequestId("r#3"), (1,), SamplingParams(), 0))
    order.sequence.sampling.stop.append("x")

    with pytest.raises(UnsupportedInput):
        engine_request(order, 0.0)


@pytest.mark.parametrize(
    "adapter", [AdapterRef("sql"), AdapterRef("sql", "0" * 513), AdapterRef("s", "0", "p" * 513)]
)
def test_nodes_refuse_adapters_without_an_id_and_overlong_ones(adapter: AdapterRef) -> None:
    request = EngineRequest(RequestId("r#3"), (1,), SamplingParams(), 0, adapter=adapter)

    with pytest.raises(InvalidRequest, match="adapter"):
        engine_request(leg_order(LegKind.PREFILL, request), 0.0)


def test_adapters_of_a_node_are_unset_if_nothing_has_changed() -> None:
    order = NameOrder("sql", 7, AdapterRef("sql", "0123", "tenants/sql"))
    loaded = LoadedAdapter("0123", "tenants/sql", num_bytes=9, num_requests=2)
    some = NodeAdapters((order, NameOrder("old", 8)), (loaded,))

    assert adapters_from(update_to(NodeLoad())) is None
    for adapters in (some, NO_ADAPTERS):
        found = adapters_from(update_to(NodeLoad(), adapters=adapters))
        assert found == adapters
        assert [each.num_requests for each in found.in_memory] == [2] * len(adapters.in_memory)


def test_node_cards_and_loads_round_trip_through_protobuf() -> None:
    card = replace(a_card(LegKind.DECODE), sampling_defaults=SamplingDefaults(0.0, top_k=5))
    load = NodeLoad(1, 2, 3, True)

    assert CARD.from_message(CARD.to_message(card)) == card
    for naming in (
        None,
        PrefixNaming(16, "m", 7),
        PrefixNaming(16, "m", 0, 4096),
        PrefixNaming(16, "m", needs_snapshot=True),
    ):
        named = replace(card, prefix_naming=naming)
        assert CARD.from_message(CARD.to_message(named)) == named
    assert LOAD.from_message(update_to(load)) == load


def test_a_call_without_a_prompt_is_refused_by_name() -> None:
    with pytest.raises(EmptyPrompt):
        calls_from(inference_pb2.GenerateRequest(), "a")


@pytest.mark.parametrize(
    "value",
    [
        Value(),
        Value(null_value=NULL_VALUE),
        Value(number_value=math.nan),
        Value(number_value=-math.inf),
        Value(struct_value=Struct()),
        Value(list_value=ListValue(values=[Value(list_value=ListValue())])),
        Value(list_value=ListValue(values=[Value(number_value=math.nan)])),
    ],
    ids=str,
)
def test_unusable_arguments_are_refused_by_name(value: Value) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling_from(sampling_pb2.SamplingParams(extra_args={"a": value}))

    assert refused.value.field == "extra_args"


def test_integral_floats_are_integers_up_to_the_exact_range() -> None:
    given = {"whole": 7.0, "large": 1e300, "half": 0.5}
    message = sampling_pb2.SamplingParams(
        extra_args={name: Value(number_value=value) for name, value in given.items()}
    )

    taken = sampling_from(message).extra_args

    assert taken == {"whole": 7, "large": 1e300, "half": 0.5}
    assert isinstance(taken["whole"], int)
    assert isinstance(taken["large"], float)


def test_each_of_several_answers_has_a_unique_id_and_seed() -> None:
    wire = request_from("a", Generation({"seed": 2**64 - 1}, n=3))

    calls = calls_from(wire, "r")

    assert [call.request_id for call in calls] == ["r-0", "r-1", "r-2"]
    assert [call.sampling.seed for call in calls] == [2**64 - 1, 0, 1]
    assert {call.prompt for call in calls} == {TextPrompt("a")}


def test_without_a_seed_each_answer_is_sampled_independently() -> None:
    calls = calls_from(request_from("a", Generation(n=2)), "r")

    assert [call.sampling.seed for call in calls] == [None, None]


def test_a_single_answer_keeps_the_request_id() -> None:
    [call] = calls_from(request_from("a", Generation()), "r")

    assert call.request_id == "r"


@pytest.mark.parametrize("sequences", [[[]], [[1, 2], []], [[1]] * (MAX_BANNED_SEQUENCES + 1)])
def test_banned_sequences_that_are_empty_or_too_many_are_refused(sequences: list[Any]) -> None:
    banned = [sampling_pb2.TokenIds(ids=one) for one in sequences]

    with pytest.raises(InvalidRequest) as refused:
        sampling_from(sampling_pb2.SamplingParams(banned_sequences=banned))

    assert refused.value.field == "banned_sequences"
