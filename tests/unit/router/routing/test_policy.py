"""Routing policies: choice of the prefill and decode node."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from baton.core.errors import InvalidConfig
from baton.core.ids import AdapterRef, ModelVariant, PrefixKeys
from baton.core.legs import LegKind
from baton.core.media import MediaSegment
from baton.core.options import build_config
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.router.dispatch.dispatcher import Assignment
from baton.router.routing.config import Routing, RoutingPolicy
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route, choose
from baton.router.routing.routing_view import RoutingRequest
from baton.router.routing.served_models import Node
from baton.rpc.cached_prefixes import PrefixChanges, pack_names
from baton.rpc.errors import IncompatibleNodes, NoNodes
from baton.rpc.node_info import NodeLoad
from tests.support.node_calls import (
    FINGERPRINT,
    NAMING,
    a_node,
    a_table,
    other_layout,
    reported_adapters,
)

PROMPT = tuple(range(100))  # six full blocks of 16, and 4 tokens
REQUEST = RoutingRequest(PROMPT)


def names_of(node: Node) -> str:
    return str(node.card.node_id)


def a_cluster(num_prefill: int = 2, num_decode: int = 2) -> NodeTable:
    return a_table(
        *(a_node(LegKind.PREFILL, f"p{n}") for n in range(num_prefill)),
        *(a_node(LegKind.DECODE, f"d{n}") for n in range(num_decode)),
    )


def with_host_blocks(node: Node, num_blocks: int) -> Node:
    return replace(node, card=replace(node.card, num_host_blocks=num_blocks))


def _with_tower(node: Node) -> Node:
    return replace(node, card=replace(node.card, encodes_pictures=True))


def pair_of(route: Route) -> tuple[str, str]:
    return ("" if not route.is_split else names_of(route.first.node)), names_of(route.last.node)


def report_prefix(table: NodeTable, name: str, token_ids: tuple[int, ...], salt: str = "") -> None:
    stored = pack_names(NAMING.names(token_ids, len(token_ids), PrefixKeys(salt)))
    table.note_prefixes(f"{name}:1", PrefixChanges(1, True, stored))


def test_round_robin_alternates_between_nodes_of_a_role() -> None:
    table = a_cluster(2, 3)
    routing = Routing(RoutingPolicy.ROUND_ROBIN)

    pairs = [pair_of(choose(table, routing, replace(REQUEST, number=n))) for n in range(6)]

    assert [decode for _, decode in pairs] == ["d0", "d1", "d2"] * 2
    assert [prefill for prefill, _ in pairs] == ["p0", "p1"] * 3


@pytest.mark.parametrize(
    "policy", [RoutingPolicy.LEAST_LOADED, RoutingPolicy.POWER_OF_TWO, RoutingPolicy.PREFIX_AWARE]
)
def test_a_less_loaded_node_is_preferred(policy: RoutingPolicy) -> None:
    table = a_cluster()
    table.note_load("d0:1", NodeLoad(num_running=3))
    table.note_load("p1:1", NodeLoad(num_waiting=2))

    pairs = {pair_of(choose(table, Routing(policy), replace(REQUEST, number=n))) for n in range(8)}

    assert pairs == {("p0", "d1")}


@pytest.mark.parametrize("policy", [RoutingPolicy.LEAST_LOADED, RoutingPolicy.PREFIX_AWARE])
def test_equally_good_nodes_alternate(policy: RoutingPolicy) -> None:
    table = a_cluster(1, 3)

    chosen = [
        names_of(choose(table, Routing(policy), replace(REQUEST, number=n)).last.node)
        for n in range(6)
    ]

    assert chosen == ["d0", "d1", "d2"] * 2


def test_sent_requests_add_load_until_they_end() -> None:
    table = a_cluster(1, 2)
    routing = Routing(RoutingPolicy.LEAST_LOADED)
    first = choose(table, routing, REQUEST)
    assignment = Assignment(table, first)

    second = choose(table, routing, REQUEST)
    assignment.close()
    third = choose(table, routing, REQUEST)

    assert names_of(first.last.node) == names_of(third.last.node) == "d0"
    assert names_of(second.last.node) == "d1"


def test_a_finished_request_adds_no_load_before_the_node_reports_it() -> None:
    table = a_cluster(2, 1)
    first = choose(table, Routing(), REQUEST)
    assignment = Assignment(table, first)
    table.note_load("p0:1", NodeLoad(num_running=1))
    assignment.note_prompt_done()

    next_turn = choose(table, Routing(), RoutingRequest(PROMPT, number=1))

    assert next_turn.first.node == first.first.node


def test_power_of_two_draws_are_uniform_and_reproducible() -> None:
    table = a_cluster(1, 5)
    requests = [replace(REQUEST, number=n) for n in range(2000)]

    def drawn(seed: int) -> list[str]:
        routing = Routing(RoutingPolicy.POWER_OF_TWO, seed=seed)
        return [names_of(choose(table, routing, request).last.node) for request in requests]

    assert drawn(1) == drawn(1) != drawn(2)
    assert all(320 < count < 480 for count in Counter(drawn(1)).values())


def test_a_prompt_is_routed_to_its_prefix_for_prefill_and_decode() -> None:
    table = a_cluster()
    report_prefix(table, "p1", PROMPT[:64])
    report_prefix(table, "d0", PROMPT[:32])
    report_prefix(table, "d1", PROMPT[:48])

    chosen = {pair_of(choose(table, Routing(), replace(REQUEST, number=n))) for n in range(4)}

    assert chosen == {("p1", "d1")}


def test_a_prefix_with_another_salt_is_no_hit() -> None:
    table = a_cluster(1, 2)
    report_prefix(table, "d1", PROMPT[:48], salt="tenant")

    mine = [choose(table, Routing(), replace(REQUEST, number=n)) for n in range(2)]
    tenants = [
        choose(table, Routing(), replace(REQUEST, number=n, cache_salt="tenant")) for n in range(2)
    ]

    assert [names_of(route.last.node) for route in mine] == ["d0", "d1"]
    assert [names_of(route.last.node) for route in tenants] == ["d1", "d1"]


def test_block_names_of_long_prompts_depend_on_the_length_if_the_model_requires_it() -> None:
    naming = PrefixNaming(16, "m", 0, max_shareable_prompt_len=50)
    decodes = [
        Node(f"d{n}:1", replace(a_node(LegKind.DECODE, f"d{n}").card, prefix_naming=naming))
        for n in range(2)
    ]
    table = a_table(*decodes)
    same_length = pack_names(naming.names(PROMPT, len(PROMPT)))
    table.note_prefixes("d1:1", PrefixChanges(1, True, same_length))

    same = choose(table, Routing(), REQUEST)
    longer = choose(table, Routing(), RoutingRequest((*PROMPT, 1)))

    assert (names_of(same.last.node), same.num_missing_tokens) == ("d1", 4)
    assert longer.num_missing_tokens == 101


def test_with_recurrent_layers_a_hit_ends_at_the_last_snapshot() -> None:
    naming = PrefixNaming(16, "m", needs_snapshot=True)
    decodes = [
        Node(f"d{n}:1", replace(a_node(LegKind.DECODE, f"d{n}").card, prefix_naming=naming))
        for n in range(2)
    ]
    table = a_table(*decodes)
    block_names = naming.names(PROMPT, len(PROMPT))
    table.note_prefixes("d1:1", PrefixChanges(1, True, pack_names(block_names[3:4])))

    route = choose(table, Routing(), REQUEST)

    assert (names_of(route.last.node), route.num_missing_tokens) == ("d1", len(PROMPT) - 64)
    assert route.block_names == tuple(naming.names(PROMPT[:-1], len(PROMPT))[-1:])


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    table = a_cluster(1, 1)
    report_prefix(table, "p0", PROMPT[:96])

    assert choose(table, Routing(), RoutingRequest(PROMPT[:96])).num_missing_tokens == 16


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    table = a_cluster(2, 1)
    report_prefix(table, "p1", PROMPT)
    table.note_load("p1:1", NodeLoad(num_waiting=4))

    route = choose(table, Routing(), REQUEST)

    assert route.is_split
    assert names_of(route.first.node) == "p0"


def test_a_match_of_less_than_a_twentieth_of_the_prompt_is_ignored() -> None:
    table = a_cluster(2, 2)
    report_prefix(table, "p0", tuple(range(16)))
    short, long = RoutingRequest(tuple(range(16 * 20))), RoutingRequest(tuple(range(16 * 20 + 1)))

    def chosen(request: RoutingRequest) -> set[str]:
        routes = [choose(table, Routing(), replace(request, number=n)) for n in range(4)]
        return {pair_of(route)[0] for route in routes}

    assert chosen(short) == {"p0"}
    assert chosen(long) == {"p0", "p1"}


def test_equally_good_nodes_alternate_despite_requests_routed_by_prefix() -> None:
    table = a_cluster(2, 1)
    report_prefix(table, "p1", PROMPT[:64])
    chosen = []

    for number in range(6):  # every other request belongs on p1
        request = RoutingRequest(PROMPT if number % 2 else (number, *PROMPT), number)
        route = choose(table, Routing(), request)
        chosen.append(pair_of(route)[0])
        Assignment(table, route).close()

    assert chosen == ["p0", "p1"] * 3


def test_evictions_add_to_the_cost_of_a_full_cache() -> None:
    table = a_cluster(2, 2)  # ten blocks each
    for name in ("p0", "d1"):
        report_prefix(table, name, tuple(range(1000, 1000 + 8 * 16)))

    chosen = {pair_of(choose(table, Routing(), replace(REQUEST, number=n))) for n in range(4)}

    assert chosen == {("p1", "d0")}


def test_a_long_match_outweighs_the_evictions_for_the_rest() -> None:
    table = a_cluster(2, 1)
    others = NAMING.names(tuple(range(1000, 1000 + 7 * 16)), 7 * 16)
    stored = pack_names((*NAMING.names(PROMPT[:48], 48), *others))
    table.note_prefixes("p1:1", PrefixChanges(1, True, stored))

    routing = Routing(kv_pulls=False)
    chosen = {pair_of(choose(table, routing, replace(REQUEST, number=n)))[0] for n in range(4)}

    assert chosen == {"p1"}


def test_blocks_kept_in_host_memory_do_not_count_as_evictions() -> None:
    table = a_table(
        a_node(LegKind.PREFILL, "p0"),
        with_host_blocks(a_node(LegKind.PREFILL, "p1"), 20),
        with_host_blocks(a_node(LegKind.PREFILL, "p2"), 12),
        a_node(LegKind.DECODE, "d0"),
    )
    for name, num_others in (("p0", 8), ("p1", 12), ("p2", 12)):  # caches of ten blocks
        report_prefix(table, name, tuple(range(1000, 1000 + num_others * 16)))

    chosen = {pair_of(choose(table, Routing(), replace(REQUEST, number=n)))[0] for n in range(4)}

    assert chosen == {"p1"}


def test_a_node_that_holds_more_blocks_than_its_cache_costs_as_much_as_a_full_one() -> None:
    table = a_table(
        a_node(LegKind.PREFILL, "p0"),
        with_host_blocks(a_node(LegKind.PREFILL, "p1"), 20),
        a_node(LegKind.DECODE, "d0"),
    )
    report_prefix(table, "p0", tuple(range(1000, 1000 + 10 * 16)))
    names = NAMING.names(PROMPT[:16], 16)
    others = NAMING.names(tuple(range(1000, 1000 + 40 * 16)), 40 * 16)
    table.note_prefixes("p1:1", PrefixChanges(1, True, pack_names((*names, *others))))

    assert pair_of(choose(table, Routing(), REQUEST))[0] == "p1"


def test_a_burst_with_one_prefix_goes_to_one_node_before_the_node_reports_it() -> None:
    table = a_cluster(1, 3)
    first = choose(table, Routing(), RoutingRequest(PROMPT, 0))
    assignment = Assignment(table, first)
    assignment.note_prompt_done()

    second = choose(table, Routing(), RoutingRequest((*PROMPT, 5, 6, 7), 1))

    assert second.last.node == first.last.node
    assert second.num_missing_tokens == 103 - 96


def test_a_cancelled_prompt_is_not_an_expected_prefix() -> None:
    table = a_cluster(1, 3)
    first = choose(table, Routing(), RoutingRequest(PROMPT, 0))
    Assignment(table, first).close()

    second = choose(table, Routing(), RoutingRequest(PROMPT, 1))

    assert second.last.node != first.last.node


def test_few_missing_tokens_are_computed_on_decode_and_the_reason_is_reported() -> None:
    table = a_cluster(1, 1)
    report_prefix(table, "d0", PROMPT)
    routing = Routing(local_prefill_below=10)

    few = choose(table, routing, REQUEST)
    many = choose(table, routing, RoutingRequest((*PROMPT, *range(12))))

    assert not few.is_split
    assert few.is_paced
    assert "4 tokens are missing" in few.local_reason
    assert many.is_split


def test_decode_does_not_compute_a_prompt_that_prefill_lacks_about_equally() -> None:
    table = a_cluster(1, 1)
    routing = Routing(local_prefill_below=200)
    fresh = choose(table, routing, REQUEST)
    report_prefix(table, "p0", PROMPT[:48])
    report_prefix(table, "d0", PROMPT[:64])

    follow_up = choose(table, routing, REQUEST)

    assert fresh.is_split  # both lack all of it
    assert follow_up.is_split  # 36 tokens or 52
    assert not follow_up.is_paced


def test_decode_computes_fewer_tokens_at_once_than_the_limit() -> None:
    table = a_cluster(1, 1)
    report_prefix(table, "d0", PROMPT)
    routing = Routing(local_prefill_below=10)  # it lacks four
    underway = []

    for number in range(4):
        route = choose(table, routing, RoutingRequest(PROMPT, number))
        underway.append((not route.is_split, Assignment(table, route)))
    for _, assignment in underway:
        assignment.close()

    assert [is_local for is_local, _ in underway] == [True, True, False, False]
    assert not choose(table, routing, REQUEST).is_split


def test_only_reported_blocks_let_a_decode_node_compute_a_prompt() -> None:
    table = a_cluster(1, 1)
    Assignment(table, choose(table, Routing(), REQUEST))

    route = choose(table, Routing(local_prefill_below=10), REQUEST)

    assert route.is_split


def test_only_nodes_with_compatible_kv_are_paired() -> None:
    other = other_layout(block_size=32)
    table = a_table(
        a_node(LegKind.PREFILL, "p-other", fingerprint=other),
        a_node(LegKind.PREFILL, "p-same"),
        a_node(LegKind.DECODE, "d-alone", fingerprint=other_layout(dtype="bfloat16")),
        a_node(LegKind.DECODE, "d"),
    )

    chosen = {pair_of(choose(table, Routing(), replace(REQUEST, number=n))) for n in range(4)}

    assert chosen == {("p-same", "d")}


def test_incompatible_prefill_and_decode_nodes_are_refused_with_the_reason() -> None:
    other = a_node(LegKind.PREFILL, fingerprint=other_layout(dtype="bfloat16"))

    with pytest.raises(IncompatibleNodes, match="dtype bfloat16 and float32"):
        choose(a_table(other, a_node(LegKind.DECODE)), Routing(), REQUEST)


def test_nodes_with_other_logprobs_do_not_serve_one_request() -> None:
    """Neither as a pair nor one after the other: logprobs of an answer have one meaning."""
    raw, raw_prefill = a_node(LegKind.DECODE, "d"), a_node(LegKind.PREFILL, "p")
    processed, prefill = (
        replace(node, card=replace(node.card, logprobs_mode="processed_logprobs"))
        for node in (a_node(LegKind.DECODE, "d2"), a_node(LegKind.PREFILL, "p2"))
    )

    table = a_table(raw, raw_prefill, processed, prefill)
    routes = [choose(table, Routing(), replace(REQUEST, number=n)) for n in range(4)]
    assert {pair_of(route) for route in routes} == {("p", "d"), ("p2", "d2")}
    assert table.pairs_with(raw) == [(raw, raw_prefill)]

    with pytest.raises(
        IncompatibleNodes,
        match="node p2 and decode node d differ in logprobs_mode processed_logprobs and raw",
    ):
        choose(a_table(raw, prefill), Routing(), REQUEST)
    begun = replace(REQUEST, revision=raw.revision)
    with pytest.raises(IncompatibleNodes, match=r"\(float32, processed_logprobs\)"):
        choose(a_table(raw, processed), Routing(), begun, without=frozenset({raw.address}))


def test_a_decode_node_computes_the_prompt_if_its_compatible_prefill_node_failed() -> None:
    other = a_node(LegKind.PREFILL, "p-other", fingerprint=other_layout(dtype="else"))
    fitting = a_node(LegKind.PREFILL, "p")
    table = a_table(other, fitting, a_node(LegKind.DECODE))

    route = choose(table, Routing(), REQUEST, without=frozenset({fitting.address}))

    assert not route.is_split
    assert "failed" in route.local_reason


def test_draining_failed_and_lost_nodes_are_skipped() -> None:
    draining, failed, lost, left = (a_node(LegKind.DECODE, f"d{n}") for n in range(4))
    table = a_table(draining, failed, lost, left)
    choose(table, Routing(), REQUEST)
    table.note_load(draining.address, NodeLoad(is_draining=True))
    table.lose(lost.address)

    route = choose(table, Routing(), REQUEST, without=frozenset({failed.address}))

    assert route.last.node == left


def test_a_request_without_a_decode_node_is_refused_by_name() -> None:
    with pytest.raises(NoNodes):
        choose(a_table(a_node(LegKind.PREFILL)), Routing(), REQUEST)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match="prefix_aware"):
        build_config(Routing, {"policy": "best"})


OTHER = replace(FINGERPRINT, model="the same in int8")


def test_a_request_stays_on_the_model_revision_that_began_it() -> None:
    p1, p2 = a_node(LegKind.PREFILL, "p1"), a_node(LegKind.PREFILL, "p2", fingerprint=OTHER)
    d1, d2 = a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2", fingerprint=OTHER)
    table = a_table(p1, p2, d1, d2)

    new = {pair_of(choose(table, Routing(), replace(REQUEST, number=n))) for n in range(6)}
    for node, pair in ((d1, ("p1", "d1")), (d2, ("p2", "d2"))):
        request = replace(REQUEST, revision=node.revision)
        kept = {pair_of(choose(table, Routing(), replace(request, number=n))) for n in range(6)}
        assert kept == {pair}

    assert new == {("p1", "d1"), ("p2", "d2")}


def test_without_prefill_nodes_an_answer_does_not_continue_on_another_revision() -> None:
    d1, d2 = a_node(LegKind.DECODE, "d1"), a_node(LegKind.DECODE, "d2", fingerprint=OTHER)
    table = a_table(d1, d2)
    begun = replace(REQUEST, revision=d1.revision)

    chosen = {pair_of(choose(table, Routing(), replace(begun, number=n))) for n in range(4)}

    assert chosen == {("", "d1")}
    with pytest.raises(IncompatibleNodes, match="begun by model revision m "):
        choose(table, Routing(), begun, without=frozenset({d1.address}))


def test_an_answer_in_progress_does_not_use_prefill_nodes_of_another_revision() -> None:
    d1, p2 = a_node(LegKind.DECODE, "d1"), a_node(LegKind.PREFILL, "p2", fingerprint=OTHER)

    route = choose(a_table(d1, p2), Routing(), replace(REQUEST, revision=d1.revision))

    assert pair_of(route) == ("", "d1")


def test_without_prefill_nodes_new_requests_stay_on_the_serving_revision() -> None:
    p1, d1 = a_node(LegKind.PREFILL, "p1"), a_node(LegKind.DECODE, "d1")
    table = a_table(p1, d1, a_node(LegKind.DECODE, "d2", fingerprint=OTHER))
    choose(table, Routing(), REQUEST)
    table.lose(p1.address)

    chosen = {pair_of(choose(table, Routing(), replace(REQUEST, number=n))) for n in range(4)}
    table.lose(d1.address)
    left = pair_of(choose(table, Routing(), REQUEST))

    assert chosen == {("", "d1")}
    assert left == ("", "d2")


def test_a_prompt_with_an_image_hits_only_the_blocks_in_front_of_it() -> None:
    prefills = [_with_tower(a_node(LegKind.PREFILL, f"p{n}")) for n in range(2)]
    table = a_table(*prefills, a_node(LegKind.DECODE, "d0"))
    report_prefix(table, "p1", PROMPT)
    with_image = replace(REQUEST, media=(MediaSegment(40, 20, bytes(32)),))

    assert choose(table, Routing(), REQUEST).num_missing_tokens == 100 - 96
    assert choose(table, Routing(), with_image).num_missing_tokens == 100 - 32


def test_a_request_with_an_adapter_hits_no_blocks_of_the_base_model() -> None:
    table = a_cluster()
    report_prefix(table, "p1", PROMPT)
    adapter = AdapterRef("adapter", "1")
    for node in table.nodes:
        table.note_adapters(node.address, reported_adapters(adapter))
    base = RoutingRequest(PROMPT, model=ModelVariant("tiny"))

    on_base = choose(table, Routing(), base)
    adapted = choose(table, Routing(), replace(base, model=ModelVariant("tiny", adapter)))

    assert on_base.num_missing_tokens < adapted.num_missing_tokens == len(PROMPT)


def test_a_prompt_with_an_image_is_computed_where_images_are_encoded() -> None:
    with_image = replace(REQUEST, media=(MediaSegment(40, 20, bytes(32)),))
    seeing, blind = a_node(LegKind.PREFILL, "p0"), a_node(LegKind.PREFILL, "p1")
    table = a_table(_with_tower(seeing), blind, a_node(LegKind.DECODE, "d0"))
    report_prefix(table, "d0", PROMPT[:48])  # for text, it would compute the rest itself

    routing = Routing(RoutingPolicy.ROUND_ROBIN, local_prefill_below=1000)
    chosen = {pair_of(choose(table, routing, replace(with_image, number=n))) for n in range(4)}

    assert chosen == {("p0", "d0")}


def test_a_decode_node_computes_a_prompt_with_an_image_only_if_it_encodes_images() -> None:
    with_image = replace(REQUEST, media=(MediaSegment(40, 20, bytes(32)),))
    blind, seeing = a_node(LegKind.DECODE, "d0"), _with_tower(a_node(LegKind.DECODE, "d1"))

    chosen = choose(a_table(blind, seeing), Routing(), with_image)

    assert names_of(chosen.last.node) == "d1"
    with pytest.raises(NoNodes, match="can get the KV of pictures"):
        choose(a_table(blind), Routing(), with_image)
