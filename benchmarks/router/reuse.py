"""Reuse of KV on a simulated cluster, with and without tiers, pulls and a second router.

The KV caches of the prefill nodes together hold a share of all blocks of the requests, and so do
those of the decode nodes. Reuse is the share of prompt tokens that are not computed. The ideal is
that of one cache without a limit, which has each block once a request with it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton.engine.kv_cache.block_hashes import BlockHash, PrefixNaming
from baton.router.routing.config import Routing
from benchmarks.router.policies import wait_s
from benchmarks.router.simulation import Served, SimCluster, Simulation, block_names
from benchmarks.router.workloads import Sessions, SimRequest, draw_sessions

CHATS = Sessions(
    num_system_prompts=10, system_tokens=128, turn_tokens=64, answer_tokens=64, has_answers=True
)


@dataclass(frozen=True, slots=True)
class ReuseBench:
    cluster: SimCluster = SimCluster()
    cache_share: float = 0.25  # of all blocks, in the KV caches of the nodes of a role
    host_factor: float = 3.0  # blocks of host memory for each block of a KV cache
    local_prefill_below: int = 256


@dataclass(frozen=True, slots=True)
class Variant:
    has_host: bool
    has_files: bool
    has_pulls: bool
    num_routers: int


VARIANTS = tuple(
    Variant(has_host, has_files, has_pulls, num_routers)
    for num_routers in (1, 2)
    for has_host, has_files, has_pulls in (
        (False, False, False),
        (False, False, True),
        (True, False, False),
        (True, False, True),
        (True, True, True),
    )
)


@dataclass(frozen=True, slots=True)
class ReuseFigures:
    """Figures of one variant. Shares are of all prompt tokens."""

    host: str
    files: str
    pulls: str
    routers: int
    reuse: float
    of_ideal: float
    from_cache: float
    from_host: float
    from_file: float
    from_peer: float
    local_prefills: float
    p50_wait_s: float
    p99_wait_s: float


def chats(num_requests: int, tokens_per_s: float, seed: int = 0) -> list[SimRequest]:
    """Return turns of conversations, whose prompts contain the earlier answers."""
    return draw_sessions(CHATS, num_requests, tokens_per_s, seed)


def run(
    bench: ReuseBench,
    requests: Sequence[SimRequest],
    on_done: Callable[[ReuseFigures], None],
    variants: Sequence[Variant] = VARIANTS,
) -> list[ReuseFigures]:
    naming = PrefixNaming(bench.cluster.block_size)
    num_blocks = len({name for each in requests for name in block_names(naming, each.sequence)})
    ideal = ideal_reuse(requests, naming)
    figures = []
    for variant in variants:
        cluster = _cluster(bench, variant, num_blocks)
        routing = Routing(local_prefill_below=bench.local_prefill_below, kv_pulls=variant.has_pulls)
        served = Simulation(cluster, routing).run(requests)
        figures.append(_figures(variant, served, cluster.block_size, ideal))
        on_done(figures[-1])
    return figures


def ideal_reuse(requests: Sequence[SimRequest], naming: PrefixNaming) -> float:
    """Return the share of prompt tokens that a cache without a limit has."""
    seen: set[BlockHash] = set()
    num_tokens = num_seen = 0
    for request in requests:
        num_tokens += len(request.token_ids)
        for name in block_names(naming, request.token_ids[:-1]):
            if name not in seen:
                break
            num_seen += naming.block_size
        seen.update(block_names(naming, request.sequence))
    return num_seen / num_tokens


def _cluster(bench: ReuseBench, variant: Variant, num_blocks: int) -> SimCluster:
    per_node = int(num_blocks * bench.cache_share / bench.cluster.num_prefill)
    return replace(
        bench.cluster,
        num_blocks=per_node,
        num_host_blocks=int(per_node * bench.host_factor) if variant.has_host else 0,
        has_files=variant.has_files,
        num_routers=variant.num_routers,
    )


def _figures(
    variant: Variant, served: Sequence[Served], block_size: int, ideal: float
) -> ReuseFigures:
    num_tokens = sum(each.num_tokens for each in served)

    def share(num_blocks: Iterable[int]) -> float:
        return sum(num_blocks) * block_size / num_tokens

    reuse = share(each.sources.num_blocks for each in served)
    return ReuseFigures(
        host=_yes(variant.has_host),
        files=_yes(variant.has_files),
        pulls=_yes(variant.has_pulls),
        routers=variant.num_routers,
        reuse=reuse,
        of_ideal=reuse / ideal,
        from_cache=share(each.sources.cache for each in served),
        from_host=share(each.sources.host for each in served),
        from_file=share(each.sources.file for each in served),
        from_peer=share(each.sources.peer for each in served),
        local_prefills=sum(each.is_local for each in served) / len(served),
        p50_wait_s=wait_s(served, 0.5),
        p99_wait_s=wait_s(served, 0.99),
    )


def _yes(is_on: bool) -> str:
    return "yes" if is_on else ""
