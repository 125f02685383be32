"""Encode legs: which nodes encode and fetch the pictures of a request, and what failures cost."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from baton.core.ids import NodeId, Peer, PrefixKeys
from baton.core.legs import LegKind
from baton.core.media import DIGEST_BYTES, MediaSegment, Picture, picture_salt
from baton.core.output import FinishReason, Output
from baton.core.request import ENCODE, PREFETCH, EngineRequest, PrefixSource
from baton.router.dispatch.node_rpcs import Deliver, LegOutput
from baton.router.routing.config import RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Leg
from baton.router.routing.served_models import Node
from baton.router.tracing import UNTRACED, RequestTrace
from baton.router.values import GenerateCall, TokenPrompt
from baton.rpc.cached_prefixes import PrefixChanges, pack_names
from baton.rpc.errors import FailureKind, NodeFailed, NoNodes
from baton.rpc.messages.calls import CallReport
from tests.support.node_calls import NAMING, FakeNodeCalls, a_node, a_table
from tests.unit.router.test_pipeline import a_call, a_pipeline, expected_tokens, run

NUM_ROWS, ROW_BYTES = 20, 100  # two blocks of 1,024 bytes
CAT, DOG = (Picture(bytes([number]) * DIGEST_BYTES, 1, 1, b"rgb") for number in (1, 2))
Call = tuple[str, str]  # kind of call, and node


@dataclass(slots=True)
class PictureNodes(FakeNodeCalls):
    """Nodes that encode and fetch pictures. Each fault hits one call."""

    encode_faults: deque[NodeFailed] = field(default_factory=deque)
    lost_fetches: int = 0  # that bring nothing
    calls: list[tuple[Call, EngineRequest]] = field(default_factory=list)

    async def call(
        self,
        leg: Leg,
        request: EngineRequest,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        trace: RequestTrace = UNTRACED,
    ) -> None:
        is_fetch = request.task is PREFETCH
        kind = "fetch" if is_fetch else leg.kind.value
        self.calls.append(((kind, leg.node.card.node_id), request))
        if not is_fetch and request.task is not ENCODE:
            await FakeNodeCalls.call(self, leg, request, deliver, timeout_s=timeout_s)
            return
        if request.task is ENCODE and self.encode_faults:
            raise self.encode_faults.popleft()
        num_cached = 32 if is_fetch and not self.lost_fetches else 0
        self.lost_fetches -= is_fetch and self.lost_fetches > 0
        end = Output(request.request_id, 0, finish_reason=FinishReason.LENGTH)
        deliver(LegOutput(leg.kind, (end,), CallReport(prompt_tokens_cached=num_cached)))

    @property
    def order(self) -> list[Call]:
        return [call for call, _ in self.calls]


def with_card(node: Node, *, encodes: bool) -> Node:
    card = replace(node.card, encodes_pictures=encodes, encoding_row_bytes=ROW_BYTES)
    return replace(node, card=card)


def a_cluster(num_encode: int = 1, *, prefill_encodes: bool = False) -> NodeTable:
    names = [f"e{number}" for number in range(num_encode)]
    return a_table(
        *(with_card(a_node(LegKind.ENCODE, name), encodes=True) for name in names),
        with_card(a_node(LegKind.PREFILL, "p"), encodes=prefill_encodes),
        with_card(a_node(LegKind.DECODE, "d"), encodes=False),
    )


def about(*pictures: Picture, prompt_tokens: int = 60) -> GenerateCall:
    media = [
        MediaSegment(index * NUM_ROWS, NUM_ROWS, picture.digest)
        for index, picture in enumerate(pictures)
    ]
    tokens = TokenPrompt(tuple(range(prompt_tokens)), tuple(media), tuple(dict.fromkeys(pictures)))
    return replace(a_call(), prompt=tokens)


def report_encoding(table: NodeTable, name: str, picture: Picture) -> None:
    rows = table.nodes[0].card.stored_rows
    assert rows is not None
    stored = rows.prompt(picture.digest, NUM_ROWS)
    keys = PrefixKeys(picture_salt(""), media=stored.media)
    names = NAMING.names(stored.token_ids, len(stored.token_ids), keys)
    table.note_prefixes(f"{name}:1", PrefixChanges(1, True, pack_names(names)))


def report_kv(table: NodeTable, name: str, call: GenerateCall, num_tokens: int) -> None:
    tokens = call.token_prompt.token_ids
    keys = PrefixKeys(media=call.token_prompt.media)
    names = NAMING.names(tokens[:num_tokens], len(tokens), keys)
    table.note_prefixes(f"{name}:1", PrefixChanges(1, True, pack_names(names)))


def sent_to_prefill(nodes: PictureNodes) -> list[tuple[Picture, ...]]:
    """Return the pictures whose pixels each prefill leg has got."""
    return [request.pictures for (kind, _), request in nodes.calls if kind == "prefill"]


def answered(nodes: PictureNodes, table: NodeTable, call: GenerateCall) -> None:
    token_ids, _ = asyncio.run(run(a_pipeline(nodes, table), call))
    assert token_ids == expected_tokens(nodes)


def test_a_picture_is_encoded_and_fetched_before_the_prompt_is_computed_without_pixels() -> None:
    nodes = PictureNodes()
    answered(nodes, a_cluster(), about(CAT, CAT))

    assert nodes.order == [("encode", "e0"), ("fetch", "p"), ("prefill", "p"), ("decode", "d")]
    encode, fetch, prefill, _ = (request for _, request in nodes.calls)
    assert encode.pictures == (CAT,)
    assert (len(encode.prompt_token_ids), encode.cache_salt) == (33, "picture!")
    assert fetch.prefix_source == PrefixSource(Peer(NodeId("e0"), "e0:1"), 32)
    assert fetch.prompt_token_ids == encode.prompt_token_ids
    assert [request.pictures for request in (fetch, prefill)] == [(), ()]


def test_pictures_of_a_request_are_brought_side_by_side() -> None:
    nodes = PictureNodes()
    answered(nodes, a_cluster(), about(CAT, DOG))

    assert sorted(nodes.order[:4]) == [("encode", "e0")] * 2 + [("fetch", "p")] * 2


def test_an_encoding_that_the_node_has_is_neither_encoded_nor_fetched() -> None:
    nodes, table = PictureNodes(), a_cluster()
    report_encoding(table, "p", CAT)
    answered(nodes, table, about(CAT))

    assert nodes.order == [("prefill", "p"), ("decode", "d")]


def test_a_picture_whose_kv_the_node_has_is_not_encoded() -> None:
    nodes, table, call = PictureNodes(), a_cluster(), about(CAT, DOG)
    report_kv(table, "p", call, 32)
    answered(nodes, table, call)

    encoded = [request.pictures for (kind, _), request in nodes.calls if kind == "encode"]
    assert encoded == [(DOG,)]


@pytest.mark.parametrize("holder", ["e0", "d"])
def test_an_encoding_that_another_node_has_is_fetched_from_there(holder: str) -> None:
    nodes, table = PictureNodes(), a_cluster()
    report_encoding(table, holder, CAT)
    answered(nodes, table, about(CAT))

    assert nodes.order[:2] == [("fetch", "p"), ("prefill", "p")]
    source = nodes.calls[0][1].prefix_source
    assert source is not None
    assert source.peer.node_id == holder


def test_an_encoding_that_the_holder_has_lost_is_encoded_again() -> None:
    nodes, table = PictureNodes(lost_fetches=1), a_cluster()
    report_encoding(table, "d", CAT)
    answered(nodes, table, about(CAT))

    assert nodes.order[:3] == [("fetch", "p"), ("encode", "e0"), ("fetch", "p")]


def test_another_encode_node_takes_the_place_of_one_that_fails() -> None:
    nodes = PictureNodes(encode_faults=deque([NodeFailed("gone")]))
    answered(nodes, a_cluster(2), about(CAT))

    assert {name for kind, name in nodes.order if kind == "encode"} == {"e0", "e1"}
    assert nodes.order[-2:] == [("prefill", "p"), ("decode", "d")]


def test_a_prefill_node_with_a_tower_takes_the_place_of_the_only_encode_node() -> None:
    nodes = PictureNodes(encode_faults=deque([NodeFailed("gone")]))
    answered(nodes, a_cluster(prefill_encodes=True), about(CAT))

    assert nodes.order == [("encode", "e0"), ("prefill", "p"), ("decode", "d")]
    assert nodes.calls[1][1].pictures == (CAT,)


def test_prefill_nodes_that_also_embed_texts_encode_no_pictures_for_others() -> None:
    nodes = PictureNodes()
    prefills = [with_card(a_node(LegKind.PREFILL, name), encodes=True) for name in ("p", "q")]
    both = (LegKind.PREFILL, LegKind.ENCODE)
    embedding = [
        replace(node, card=replace(node.card, legs=both, vector_size=4)) for node in prefills
    ]
    table = a_table(*embedding, with_card(a_node(LegKind.DECODE, "d"), encodes=False))
    answered(nodes, table, about(CAT))

    assert [kind for kind, _ in nodes.order] == ["prefill", "decode"]


def test_the_encode_node_is_to_blame_if_its_encodings_never_arrive() -> None:
    nodes = PictureNodes(lost_fetches=99)

    with pytest.raises(NodeFailed, match="encode node e0:1"):
        asyncio.run(run(a_pipeline(nodes, a_cluster()), about(CAT)))


def test_without_towers_and_encode_nodes_pictures_are_refused() -> None:
    with pytest.raises(NoNodes, match="pictures"):
        asyncio.run(run(a_pipeline(PictureNodes(), a_cluster(0)), about(CAT)))


def test_encode_nodes_with_other_blocks_are_not_used() -> None:
    other = with_card(a_node(LegKind.ENCODE, "e0"), encodes=True)
    other = replace(other, card=replace(other.card, block_bytes=2048))
    seeing = with_card(a_node(LegKind.PREFILL, "p"), encodes=True)
    nodes = PictureNodes()

    answered(nodes, a_table(other, seeing, a_node(LegKind.DECODE, "d")), about(CAT))

    assert nodes.order == [("prefill", "p"), ("decode", "d")]


def test_without_encode_nodes_pixels_go_to_nodes_that_have_not_reported_the_kv_of_a_picture() -> (
    None
):
    nodes, table = PictureNodes(), a_cluster(0, prefill_encodes=True)
    call = about(CAT, DOG)
    answered(nodes, table, call)
    report_kv(table, "d", call, 48)  # which gets no pixels in any case
    answered(nodes, table, call)
    for num_tokens in (16, 32, 48):
        report_kv(table, "p", call, num_tokens)
        answered(nodes, table, call)

    assert sent_to_prefill(nodes) == [(CAT, DOG), (CAT, DOG), (CAT, DOG), (DOG,), ()]


@pytest.mark.parametrize("without", ["room", "names of blocks", "a prefix that it uses"])
def test_pixels_are_sent_again_to_a_node_that_would_refuse_to_do_without(without: str) -> None:
    nodes, table, call = PictureNodes(), a_cluster(0, prefill_encodes=True), about(CAT)
    prefill = next(node for node in table.nodes if node.offers(LegKind.PREFILL))
    if without == "room":  # for the prompt and two stored blocks
        table.join(prefill.address, replace(prefill.card, max_sequence_len=60 + 31))
    elif without == "names of blocks":
        table.join(prefill.address, replace(prefill.card, encoding_row_bytes=0))
    else:
        call = replace(call, sampling=replace(call.sampling, prompt_logprobs=1))
    report_kv(table, "p", call, 48)
    asyncio.run(run(a_pipeline(nodes, table), call))

    assert sent_to_prefill(nodes) == [(CAT,)]


def test_a_node_that_has_lost_the_kv_of_pictures_gets_their_pixels_and_no_blame() -> None:
    lost = NodeFailed("no pixels", FailureKind.KV_LOST)
    nodes, table = PictureNodes(), a_cluster(0, prefill_encodes=True)
    call, other = about(CAT), with_card(a_node(LegKind.PREFILL, "q"), encodes=True)
    table.join(other.address, other.card)
    report_kv(table, "p", call, 48)
    pipeline = a_pipeline(nodes, table, max_in_flight=1, policy=RoutingPolicy.PREFIX_AWARE)
    for _ in range(4):
        nodes.prefill_faults = [lost]
        asyncio.run(run(pipeline, call))

    assert [name for kind, name in nodes.order if kind == "prefill"] == ["p"] * 8
    assert sent_to_prefill(nodes) == [(), (CAT,)] * 4
    nodes.prefill_faults = [lost] * 3  # with pixels, they are failures like any others
    with pytest.raises(NodeFailed):
        asyncio.run(run(pipeline, call))
    assert sent_to_prefill(nodes)[8:] == [(), (CAT,), (CAT,)]
