"""Routing policies on a small simulated cluster: distinct and reproducible figures."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from baton.router.routing.config import RoutingPolicy
from benchmarks.router.policies import (
    PolicyBench,
    PolicyFigures,
    make_requests,
    run,
    simulate,
)
from benchmarks.router.simulation import SimCluster
from benchmarks.router.workloads import Sessions, SimRequest

pytestmark = pytest.mark.slow

BLOCK = 4
SMALL_CLUSTER = SimCluster(num_prefill=10, num_decode=10, block_size=64)
SMALL = PolicyBench(SMALL_CLUSTER, Sessions(num_system_prompts=5), num_requests=400)


def figures_of(what: PolicyBench, policy: RoutingPolicy) -> PolicyFigures:
    return simulate(what, policy, make_requests(what))


def test_requests_are_ordered_and_arrive_at_the_requested_rate() -> None:
    requests = make_requests(SMALL)

    times = [request.at_s for request in requests]
    tokens_per_s = sum(len(request.token_ids) for request in requests) / times[-1]
    assert times == sorted(times)
    assert 0.6 < tokens_per_s / (10 * SMALL_CLUSTER.prefill_tokens_per_s) < 0.8


def test_the_prefix_aware_policy_has_the_most_hits_and_the_shortest_waits() -> None:
    figures = {one.policy: one for one in run(SMALL, lambda done: None)}

    best = figures.pop(RoutingPolicy.PREFIX_AWARE.value)
    assert len(figures) == len(RoutingPolicy) - 1
    assert all(best.prefill_hit_rate > 1.3 * other.prefill_hit_rate for other in figures.values())
    assert all(best.p99_wait_s < other.p99_wait_s for other in figures.values())


def test_simulation_results_depend_on_the_seed_alone() -> None:
    tiny = replace(SMALL, num_requests=50)
    first, again, other = (
        figures_of(bench, RoutingPolicy.POWER_OF_TWO)
        for bench in (tiny, tiny, replace(tiny, seed=1))
    )

    assert first == again != other


def one_at_a_time(num_requests: int, *, seed: int = 0) -> list[SimRequest]:
    """Return prompts with a common first block; a third of them repeats one of the last 80."""
    draw = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    for _ in range(num_requests):
        if len(prompts) > 80 and draw.random() < 1 / 3:
            prompts.append(draw.choice(prompts[-80:]))
        else:
            length = draw.randrange(21, 40) * BLOCK
            prompts.append((*range(BLOCK), *draw.choices(range(50_000), k=length)))
    return [SimRequest(1000.0 * number, prompt) for number, prompt in enumerate(prompts)]


def prefix_aware(requests: list[SimRequest], *, num_nodes: int, num_blocks: int) -> PolicyFigures:
    cluster = SimCluster(num_nodes // 2, num_nodes // 2, block_size=BLOCK, num_blocks=num_blocks)
    return simulate(PolicyBench(cluster), RoutingPolicy.PREFIX_AWARE, requests)


def test_a_shared_first_block_does_not_concentrate_a_light_load_on_one_node() -> None:
    requests = one_at_a_time(400)

    two = prefix_aware(requests, num_nodes=4, num_blocks=600)

    possible = prefix_aware(requests, num_nodes=2, num_blocks=1200)  # one cache of both sizes
    alone = prefix_aware(requests, num_nodes=2, num_blocks=600)
    assert two.busiest_prefill < 0.6
    assert two.prefill_hit_rate > 0.95 * possible.prefill_hit_rate
    assert alone.prefill_hit_rate < 0.7 * possible.prefill_hit_rate
