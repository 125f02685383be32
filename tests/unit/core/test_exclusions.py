"""Table of features that exclude each other."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.core.exclusions import EXCLUSIONS, Exclusion, Feature, check_exclusions


@pytest.mark.parametrize("row", EXCLUSIONS, ids=lambda row: f"{row.feature.name}-{row.other.name}")
def test_two_used_features_of_one_row_are_refused_with_the_message_of_the_row(
    row: Exclusion,
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        check_exclusions({row.feature: "a value", row.other: True})

    assert str(refused.value) == row.message


def test_unused_features_exclude_nothing() -> None:
    for row in EXCLUSIONS:
        check_exclusions({row.feature: True, row.other: 0})
        check_exclusions({row.feature: "", row.other: True})
        check_exclusions({row.feature: True})


def test_each_feature_is_in_a_row_and_no_pair_is_in_two() -> None:
    pairs = [frozenset((row.feature, row.other)) for row in EXCLUSIONS]

    assert len(set(pairs)) == len(pairs)
    assert frozenset().union(*pairs) == set(Feature)
