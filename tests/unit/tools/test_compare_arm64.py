"""Comparison of two builds' kernel outputs, with handmade lines."""

from __future__ import annotations

import pytest

from tools.compare_arm64 import are_alike, compared


def reported(*bits: int, kernel: str = "norm") -> str:
    return " ".join([kernel, *(f"{one:04x}" for one in bits)])


MANY = [0x3F80] * 2000


def test_the_same_numbers_are_alike() -> None:
    tally = compared(reported(*MANY), reported(*MANY))

    assert tally == {"norm": [2000, 0, 0]}
    assert are_alike(tally)


def test_a_few_may_be_rounded_otherwise() -> None:
    assert are_alike(compared(reported(0x3F80, *MANY), reported(0x3F81, *MANY)))
    assert not are_alike(compared(reported(*MANY), reported(*[one + 1 for one in MANY])))


def test_a_number_that_is_further_away_is_wrong() -> None:
    tally = compared(reported(0x3F80, *MANY), reported(0x3F82, *MANY))

    assert tally == {"norm": [2001, 0, 1]}
    assert not are_alike(tally)


def test_a_place_is_right_or_wrong() -> None:
    own, other = reported(7, *MANY, kernel="argmax"), reported(8, *MANY, kernel="argmax")

    assert not are_alike(compared(own, other))


def test_each_kernel_stands_for_itself() -> None:
    own = "\n".join([reported(*MANY), reported(5, kernel="gate")])
    other = "\n".join([reported(*MANY), reported(6, kernel="gate")])

    assert not are_alike(compared(own, other))


def test_programs_that_tell_nothing_are_not_alike() -> None:
    assert not are_alike(compared("", ""))


def test_other_programs_are_not_compared() -> None:
    with pytest.raises(ValueError, match="the programs differ"):
        compared(reported(1), reported(1, kernel="gate"))
    with pytest.raises(ValueError, match="longer"):
        compared(reported(1), reported(1, 2))
