"""Figures of the KV benchmark, computed from rounds."""

from __future__ import annotations

from benchmarks.kv.figures import KvRound, figure_of

MIB = 1 << 20


def a_round(contiguous: float, written: float, landed: float) -> KvRound:
    return KvRound(
        memcpy=0.001,
        contiguous=contiguous,
        noticed=2 * contiguous,
        scattered=contiguous,
        written=written,
        landed=landed,
        verified_written=2 * written,
        verified_landed=2 * landed,
        handoff=landed + 0.001,
        handoff_verified=landed + 0.002,
    )


def test_rates_are_medians_and_shares_are_relative_to_the_contiguous_write_of_the_same_round() -> (
    None
):
    # The machine is three times slower in the second half, which must not affect the shares.
    rounds = [a_round(0.004, 0.004, 0.005)] * 3 + [a_round(0.012, 0.012, 0.015)] * 4

    figure = figure_of("nixl", MIB, 8, 8 * MIB, rounds)

    assert round(figure["contiguous"], 3) == round(8 * MIB / 0.012 / 1e9, 3)
    assert round(figure["noticed"], 3) == round(8 * MIB / 0.024 / 1e9, 3)
    assert figure["written_ratio"] == 1.0
    assert round(figure["landed_ratio"], 3) == 0.8
    assert round(figure["verified_written_ratio"], 3) == 0.5
    assert round(figure["verified_landed_ratio"], 3) == 0.4
    assert round(figure["handoff_us"]) == 16_000


def test_blocks_smaller_than_the_measured_size_are_compared_per_byte() -> None:
    figure = figure_of("nixl", 1792 << 10, 4, 8 * MIB, [a_round(0.008, 0.007, 0.007)])

    assert figure["handoff_mib"] == 7
    assert figure["written_ratio"] == 1.0
