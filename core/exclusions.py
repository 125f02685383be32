"""Table of the features that exclude each other, where several configs or models meet. Pure.

They are checked where they meet, at start. What the fields of one config need of each other, it
checks itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from baton.core.errors import InvalidConfig


class Feature(Enum):
    """Feature that is in use, or an expected one that is not (NO_...)."""

    ADAPTERS = auto()
    NO_ADAPTABLE_LAYERS = auto()
    NO_HOST_MEMORY_TIER = auto()
    BACKING_TIER = auto()
    SEVERAL_RANKS = auto()
    GPU = auto()
    TRAINED_DRAFTS = auto()


class Exclusion(NamedTuple):
    feature: Feature
    other: Feature
    message: str  # names both, and the reason if it is not plain


EXCLUSIONS = (
    Exclusion(
        Feature.ADAPTERS,
        Feature.NO_ADAPTABLE_LAYERS,
        "--lora and --lora-root cannot be used with this model: it has no linear layers that "
        "adapters can change",
    ),
    Exclusion(
        Feature.BACKING_TIER,
        Feature.NO_HOST_MEMORY_TIER,
        "what is behind host memory, such as --kv-folder, needs --kv-host-memory, such as 1GiB: "
        "blocks wait there to be stored",
    ),
    Exclusion(
        Feature.SEVERAL_RANKS,
        Feature.GPU,
        "--tensor-parallel-size: on CPUs alone so far; use --device cpu",
    ),
    Exclusion(
        Feature.SEVERAL_RANKS,
        Feature.TRAINED_DRAFTS,
        "--tensor-parallel-size: models and heads cannot draft yet; use --speculative suffix:8",
    ),
)


def check_exclusions(are_used: Mapping[Feature, object]) -> None:
    """Raise InvalidConfig for the first row of the table whose features are both used."""
    used = {feature for feature, is_used in are_used.items() if is_used}
    for row in EXCLUSIONS:
        if row.feature in used and row.other in used:
            raise InvalidConfig(row.message)
