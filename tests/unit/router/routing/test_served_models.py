"""Several models behind one router: names, nodes, prefixes and revisions do not mix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.legs import LegKind
from baton.core.request import EMBED, GENERATE, Task
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import choose
from baton.router.routing.routing_view import RoutingRequest
from baton.router.routing.served_models import Node
from baton.rpc.errors import NoNodes
from tests.support.node_calls import (
    FINGERPRINT,
    NAMING,
    a_node_of,
    a_table,
    an_embedder,
    that_embeds,
)

PROMPT = tuple(range(100))
A, B = ModelVariant("a"), ModelVariant("b")


def a_pair_of(model: str, **fields: Any) -> tuple[Node, Node]:
    return (
        a_node_of(model, LegKind.PREFILL, **fields),
        a_node_of(model, LegKind.DECODE, **fields),
    )


def test_a_request_without_a_model_goes_to_the_only_one_that_can_do_its_task() -> None:
    table = a_table(*a_pair_of("chat"), an_embedder())

    assert table.find_model("") == ModelVariant("chat")
    assert table.find_model("", EMBED) == ModelVariant("embedder")
    assert table.find_model("embedder") == ModelVariant("embedder")
    assert NodeTable().find_model("") == ANY_MODEL


def test_a_decoder_on_prefill_nodes_alone_only_embeds() -> None:
    prefill, decode = a_pair_of("chat")
    decoder = an_embedder("decoder", size=8)
    decoder = replace(decoder, card=replace(decoder.card, generates=True, max_model_len=64))
    table = a_table(prefill, decoder, decode)

    assert table.find_model("") == ModelVariant("chat")
    served = table.served_model(ModelVariant("decoder"))
    assert (served.tasks, served.max_model_len) == (("embed", "token_embed"), 64)

    table.lose(decode.address)  # a request waits for its return instead of being refused
    assert table.find_model("") == ModelVariant("chat")


def expecting(*nodes: Node) -> NodeTable:
    """Return the table of a router whose options name a chat model and an embedder."""
    table = NodeTable(("chat", "embedder"))
    for node in nodes:
        table.join(node.address, node.card)
    return table


def test_a_request_waits_for_the_expected_model_that_may_do_its_task() -> None:
    assert expecting(an_embedder()).find_model("") == ModelVariant("chat")
    assert expecting(*a_pair_of("chat")).find_model("", EMBED) == ModelVariant("embedder")
    others = expecting(an_embedder(), *a_pair_of("other"))
    assert others.find_model("") == ModelVariant("other")

    prefill, decode = a_pair_of("chat")
    table = expecting(prefill, decode, that_embeds(a_node_of("embedder", LegKind.PREFILL)))
    for node in (prefill, decode):
        table.lose(node.address)
    assert table.find_model("") == ModelVariant("chat")  # it is known to generate


def test_a_request_is_not_guessed_a_model_before_nodes_tell_which_one_it_means() -> None:
    prefill, decode = (that_embeds(node, vector_size=4) for node in a_pair_of("chat"))
    for joined in ((), (prefill,), (an_embedder("other"),)):
        table = expecting(*joined)
        with pytest.raises(NoNodes, match=r"too few nodes .* generate text; .*: chat, embedder$"):
            table.find_model("")
        table.join(decode.address, decode.card)
        assert table.find_model("") == ModelVariant("chat")


@pytest.mark.parametrize(
    ("nodes", "task", "expected"),
    [
        (
            (*a_pair_of("b"), *a_pair_of("a")),
            GENERATE,
            "several models can generate text .*: a, b$",
        ),
        ((*a_pair_of("a"), *a_pair_of("b")), EMBED, "no model can embed here; .*: a, b$"),
        ((an_embedder("x"), an_embedder("y"), *a_pair_of("a")), EMBED, "can embed here; .*: x, y$"),
    ],
)
def test_a_request_that_must_name_a_model_is_refused_with_the_list(
    nodes: tuple[Node, ...], task: Task, expected: str
) -> None:
    with pytest.raises(InvalidRequest, match=expected) as refusal:
        a_table(*nodes).find_model("", task)
    assert refusal.value.field == "model"


def test_tasks_of_models() -> None:
    labels = an_embedder("labels", has_labels=True)
    both = [that_embeds(node, vector_size=4) for node in a_pair_of("both")]
    late = an_embedder("late", pools_tokens=True)
    table = a_table(*a_pair_of("chat"), an_embedder(), labels, late, *both)

    tasks = {name: table.served_model(table.find_model(name)).tasks for name in table.models}
    assert tasks == {
        "chat": ("generate",),
        "embedder": ("embed", "token_embed"),
        "labels": ("classify",),
        "late": ("token_embed",),
        "both": ("generate", "embed", "token_embed"),
    }


def test_each_model_has_the_batch_slots_of_its_own_nodes() -> None:
    prefill, decode = a_pair_of("chat", max_num_seqs=8)
    more = a_node_of("chat", LegKind.DECODE, "more", max_num_seqs=4)
    table = a_table(prefill, decode, more, an_embedder(max_num_seqs=16))

    assert table.batch_slots() == {"chat": 12, "embedder": 16}
    table.note_ready(decode.address, is_ready=False)
    table.note_ready(more.address, is_ready=False)
    assert table.batch_slots() == {"chat": 0, "embedder": 16}


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_nodes_of_equal_weights_but_another_name_do_not_serve(policy: RoutingPolicy) -> None:
    same = {"fingerprint": FINGERPRINT, "prefix_naming": NAMING}
    table = a_table(*a_pair_of("a", **same), *a_pair_of("b", **same))

    for number in range(4):
        for model in (A, B):
            request = RoutingRequest(PROMPT, number=number, model=model)
            route = choose(table, Routing(policy), request)
            assert route.is_split
            assert {route.first.node.card.model, route.last.node.card.model} == {model.name}
    assert {group.model for group in table.groups()} == {"a", "b"}
    [pair] = table.pairs_with(table.nodes[0])
    assert {node.card.model for node in pair} == {"a"}


def test_a_revision_is_not_continued_by_another_model() -> None:
    same = {"fingerprint": FINGERPRINT}
    prefill, decode = a_pair_of("a", **same)
    table = a_table(prefill, decode, *a_pair_of("b", **same))
    request = RoutingRequest(PROMPT, model=A, revision=decode.revision)
    assert choose(table, Routing(), request).last.node == decode

    table.lose(decode.address)

    with pytest.raises(NoNodes):
        choose(table, Routing(), request)
    assert choose(table, Routing(), replace(request, model=B)).last.node.card.model == "b"


def test_prompts_are_named_only_as_the_nodes_of_their_model_do() -> None:
    table = a_table(*a_pair_of("a"), *a_pair_of("b"))

    routes = [choose(table, Routing(), RoutingRequest(PROMPT, model=model)) for model in (A, B)]

    num_blocks = (len(PROMPT) - 1) // FINGERPRINT.layout.block_size
    assert [len(route.block_names) for route in routes] == [num_blocks] * 2
    assert not set(routes[0].block_names) & set(routes[1].block_names)


def test_a_request_from_before_any_node_must_name_a_model_when_there_are_several() -> None:
    request = RoutingRequest(PROMPT)

    route = choose(a_table(*a_pair_of("a"), an_embedder()), Routing(), request)
    assert route.last.node.card.model == "a"
    with pytest.raises(InvalidRequest, match="set model to one of: a, b"):
        choose(a_table(*a_pair_of("a"), *a_pair_of("b")), Routing(), request)
