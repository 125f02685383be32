"""Tracing benchmark: the same load alternately on a cluster with tracing and one without."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from baton.cluster import ClusterOptions, LocalCluster
from benchmarks.cluster.rounds import OnRound, PairedFigure, RoundsBench, Variant, play

# Trace ratio by name; None: a cluster without tracing. "off again" shows the noise of the
# measurement.
RATIOS = {"off": None, "off again": None, "1 %": 0.01, "100 %": 1.0}


def run(bench: RoundsBench, on_round: OnRound) -> list[PairedFigure]:
    with (
        TemporaryDirectory(prefix="baton-bench-") as folder,
        LocalCluster(_options(bench, "off")) as off,
        LocalCluster(_options(bench, folder)) as on,
    ):
        variants = {
            name: Variant(off.address) if ratio is None else Variant(on.address, ratio)
            for name, ratio in RATIOS.items()
        }
        return play(bench, variants, on_round)


def _options(bench: RoundsBench, trace_dir: str) -> ClusterOptions:
    traces = ("--trace-dir", trace_dir)
    return ClusterOptions(
        model=bench.model,
        node_arguments=(*bench.node_arguments, *traces),
        router_arguments=traces,
    )
