"""Simulated reuse of KV: tiers and pulls serve what caches have lost."""

from __future__ import annotations

from dataclasses import replace

from baton.core.legs import LegKind
from baton.engine.kv_cache.block_hashes import BlockHash, PrefixNaming
from baton.router.routing.prefix_index import NodePrefixes
from baton.router.routing.served_models import Node
from benchmarks.replay.trace import ReplayTrace, TraceRequest
from benchmarks.router.reuse import ReuseBench, Variant, chats, ideal_reuse, run
from benchmarks.router.sim_node import LruBlocks, SimNode, Sources
from benchmarks.router.workloads import SimRequest, recorded
from tests.support.node_calls import a_card

NAMES = [BlockHash(bytes((number,)) * 16) for number in range(8)]


def a_node(num_blocks: int, num_host_blocks: int = 0) -> SimNode[None]:
    card = replace(a_card(LegKind.PREFILL), num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    return SimNode[None](Node("p:1", card), num_watchers=1)


def test_the_end_of_the_oldest_sequence_is_evicted_first() -> None:
    blocks = LruBlocks(4)
    blocks.add(NAMES[:2])
    blocks.add(NAMES[2:4])
    blocks.touch(NAMES[:2])

    added, removed = blocks.add(NAMES[4:5])

    assert added == (NAMES[4],)
    assert removed == (NAMES[3],)


def test_blocks_are_taken_from_the_nearest_place_that_has_them() -> None:
    node = a_node(2, num_host_blocks=4)
    node.store(NAMES[:4])

    sources = node.find(NAMES, files=set(NAMES[:5]), num_on_peer=7)

    assert sources == Sources(cache=2, host=2, file=1, peer=2)


def test_a_node_reports_a_block_until_neither_cache_nor_host_memory_has_it() -> None:
    node, known = a_node(1, num_host_blocks=2), NodePrefixes()
    reported = []

    for name in NAMES[:4]:
        node.store([name])
        for changes in node.take_changes(0):
            known.take("p", changes)
        reported.append([each for each in NAMES if known.match([each]).reported])

    assert reported == [NAMES[:1], NAMES[:2], NAMES[1:3], NAMES[2:4]]


def test_ideal_reuse_counts_prefixes_of_earlier_prompts_and_answers() -> None:
    first = SimRequest(0.0, tuple(range(32)), answer_ids=tuple(range(32, 49)))
    same_start = SimRequest(1.0, (*range(16), *range(100, 116)))
    next_turn = SimRequest(2.0, (*range(49), 7))

    # Of 114 tokens; the last one of a prompt is always computed.
    assert ideal_reuse([first, same_start, next_turn], PrefixNaming(16)) == (16 + 48) / 114


def test_host_memory_and_pulls_each_add_to_the_reuse_of_chats() -> None:
    what = ReuseBench(cache_share=0.2)
    variants = [
        Variant(has_host, False, has_pulls, num_routers=1)
        for has_host, has_pulls in ((False, False), (True, False), (True, True))
    ]

    plain, host, both = run(what, chats(100, 2000.0), lambda _: None, variants)

    assert plain.of_ideal + 0.1 < host.of_ideal < both.of_ideal - 0.05
    assert plain.from_host == plain.from_peer == host.from_peer == 0
    assert min(host.from_host, both.from_peer) > 0.01


def test_a_recorded_trace_keeps_its_blocks_and_has_the_requested_load() -> None:
    requests = [
        TraceRequest(n / 2, length, 512, ("1", f"{2 + n}")[: length // 512])
        for n, length in enumerate((1024, 700))
    ]

    trace = ReplayTrace("mooncake", 512, tuple(requests))
    first, second = recorded(trace, tokens_per_s=53.0, block_size=16)

    assert (len(first.token_ids), len(second.token_ids)) == (32, 21)
    assert first.token_ids[:16] == second.token_ids[:16]
    assert first.token_ids[16] != second.token_ids[16]
    assert (first.at_s, second.at_s) == (0.0, 1.0)
    assert second.num_answer_tokens == 16
