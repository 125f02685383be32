"""Benchmark of node options: the same load alternately on a cluster with them and one without."""

from __future__ import annotations

from baton.cluster import ClusterOptions, LocalCluster
from benchmarks.cluster.rounds import OnRound, PairedFigure, RoundsBench, Variant, play

UNTRACED = ("--trace-dir", "off")


def run(bench: RoundsBench, added: tuple[str, ...], on_round: OnRound) -> list[PairedFigure]:
    """Compare a prefill and a decode node with and without the options `added`."""
    with LocalCluster(_options(bench)) as plain, LocalCluster(_options(bench, *added)) as changed:
        variants = {
            "without": Variant(plain.address),
            "without again": Variant(plain.address),  # shows the noise of the measurement
            " ".join(added): Variant(changed.address),
        }
        return play(bench, variants, on_round)


def _options(bench: RoundsBench, *added: str) -> ClusterOptions:
    return ClusterOptions(
        model=bench.model,
        node_arguments=(*bench.node_arguments, *UNTRACED, *added),
        router_arguments=UNTRACED,
    )
