"""Routing policies on a simulated cluster, by hit rate and waiting time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.legs import LegKind
from baton.router.routing.config import Routing, RoutingPolicy
from benchmarks.router.simulation import Served, SimCluster, Simulation
from benchmarks.router.workloads import Sessions, SimRequest, draw_sessions


@dataclass(frozen=True, slots=True)
class PolicyBench:
    """Simulated cluster and load."""

    cluster: SimCluster = SimCluster(num_prefill=500, num_decode=500, block_size=64)
    sessions: Sessions = field(default_factory=Sessions)
    num_requests: int = 6_000
    load: float = 0.7  # relative to the prefill capacity without prefix hits
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Figures of the requests after the first third, which warms the caches."""

    policy: str
    prefill_hit_rate: float  # share of prompt tokens cached on the prefill node
    decode_hit_rate: float  # share of prompt tokens cached on the decode node, hence not moved
    p50_wait_s: float  # from the request to its first token
    p99_wait_s: float
    busiest_decode: int  # maximum of concurrent answers on one node
    busiest_prefill: float  # largest share of prompt tokens on one node


def run(bench: PolicyBench, on_done: Callable[[PolicyFigures], None]) -> list[PolicyFigures]:
    requests = make_requests(bench)
    figures = []
    for policy in RoutingPolicy:
        figures.append(simulate(bench, policy, requests))
        on_done(figures[-1])
    return figures


def make_requests(bench: PolicyBench) -> list[SimRequest]:
    capacity = bench.cluster.num_prefill * bench.cluster.prefill_tokens_per_s
    return draw_sessions(bench.sessions, bench.num_requests, bench.load * capacity, bench.seed)


def simulate(
    bench: PolicyBench, policy: RoutingPolicy, requests: Sequence[SimRequest]
) -> PolicyFigures:
    """Serve requests on nodes without tiers."""
    simulation = Simulation(bench.cluster, Routing(policy, seed=bench.seed, kv_pulls=False))
    served = simulation.run(requests)
    counted = served[len(requests) // 3 :]
    num_tokens = sum(each.num_tokens for each in counted)
    num_hit = sum(each.sources.num_blocks for each in counted) * bench.cluster.block_size
    nodes = simulation.nodes.values()
    prefills = [node for node in nodes if node.node.offers(LegKind.PREFILL)]
    decodes = [node for node in nodes if node.node.offers(LegKind.DECODE)]
    return PolicyFigures(
        policy=policy.value,
        prefill_hit_rate=num_hit / num_tokens,
        decode_hit_rate=sum(each.num_on_decode for each in counted) / num_tokens,
        p50_wait_s=wait_s(counted, 0.5),
        p99_wait_s=wait_s(counted, 0.99),
        busiest_decode=max(node.most_requests for node in decodes),
        busiest_prefill=max(node.num_tokens for node in prefills)
        / sum(node.num_tokens for node in prefills),
    )


def wait_s(served: Sequence[Served], share: float) -> float:
    """Return a quantile of the times to the first token."""
    waits = sorted(each.wait_s for each in served)
    return waits[int(len(waits) * share)]
