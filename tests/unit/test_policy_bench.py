"""The policies on a small simulated cluster: the figures must tell them apart, and repeat."""

from __future__ import annotations

from baton.bench.policies import PolicyBench, PolicyFigures, Simulation, make_requests, run
from router.policy import Policy

SMALL = PolicyBench(num_nodes=20, num_requests=600, num_system_prompts=5)


def figures_of(what: PolicyBench, policy: Policy) -> PolicyFigures:
    return Simulation(what, policy).run(make_requests(what))


def test_requests_come_in_order_at_the_rate_that_was_asked_for() -> None:
    requests = make_requests(SMALL)

    times = [request.at_s for request in requests]
    tokens_per_s = sum(len(request.token_ids) for request in requests) / times[-1]
    assert times == sorted(times)
    assert 0.6 < tokens_per_s / (10 * SMALL.prefill_tokens_per_s) < 0.8


def test_every_policy_is_simulated_and_the_one_that_knows_prefixes_finds_most_and_waits_least() -> (
    None
):
    figures = {one.policy: one for one in run(SMALL, lambda done: None)}

    best = figures.pop(Policy.PREFIX_AWARE.value)
    assert len(figures) == len(Policy) - 1
    assert all(best.prefill_hit_rate > 1.3 * other.prefill_hit_rate for other in figures.values())
    assert all(best.p99_wait_s < other.p99_wait_s for other in figures.values())


def test_one_seed_gives_one_result_and_another_seed_another() -> None:
    first, again = figures_of(SMALL, Policy.POWER_OF_TWO), figures_of(SMALL, Policy.POWER_OF_TWO)
    other = figures_of(PolicyBench(num_nodes=20, num_requests=600, seed=1), Policy.POWER_OF_TWO)

    assert first == again != other
