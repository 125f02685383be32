"""Benchmark of the prefix index, on a small scale."""

from __future__ import annotations

from benchmarks.router.prefix_index import run


def test_the_index_benchmark_measures_every_figure() -> None:
    figures = run(num_nodes=3, names_per_node=6000, num_blocks=20)

    assert (figures.num_nodes, figures.names_per_node, figures.num_blocks) == (3, 6000, 20)
    assert figures.bytes_per_name > 4
    assert figures.million_names_per_s > 0
    assert figures.ratio_to_dictionary > 0
    assert 0 < figures.p99_update_ms <= figures.worst_update_ms
    assert figures.match_ms > 0
    assert figures.drop_ms > 0
