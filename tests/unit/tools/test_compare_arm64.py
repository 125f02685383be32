"""Comparison of two builds' kernel outputs, with handmade lines."""

from __future__ import annotations

import pytest

from tools.compare_arm64 import KernelTally, are_equal, compare


def reported(*bits: int, kernel: str = "norm") -> str:
    return " ".join([kernel, *(f"{one:04x}" for one in bits)])


MANY = [0x3F80] * 2000


def test_the_same_numbers_are_equal() -> None:
    tallies = compare(reported(*MANY), reported(*MANY))

    assert tallies == {"norm": KernelTally(2000)}
    assert are_equal(tallies)


def test_one_number_rounded_differently_is_a_difference() -> None:
    tallies = compare(reported(0x3F80, *MANY), reported(0x3F81, *MANY))

    assert tallies == {"norm": KernelTally(2001, num_different=1, max_steps=1)}
    assert not are_equal(tallies)


def test_the_largest_difference_is_reported() -> None:
    tallies = compare(reported(5, 0x3F80, *MANY), reported(4, 0x3F83, *MANY))

    assert tallies == {"norm": KernelTally(2002, num_different=2, max_steps=3)}
    assert not are_equal(tallies)


def test_each_kernel_must_be_equal() -> None:
    own = "\n".join([reported(*MANY), reported(5, kernel="gate")])
    other = "\n".join([reported(*MANY), reported(6, kernel="gate")])

    assert not are_equal(compare(own, other))


def test_programs_without_output_are_not_equal() -> None:
    assert not are_equal(compare("", ""))


def test_other_programs_are_not_compared() -> None:
    with pytest.raises(ValueError, match="the programs differ"):
        compare(reported(1), reported(1, kernel="gate"))
    with pytest.raises(ValueError, match="longer"):
        compare(reported(1), reported(1, 2))
