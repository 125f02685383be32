"""One table of the settings and model features that exclude each other, checked at start. Pure.

Each config checks the rows of its own fields when it is made. Features that meet later, such as
those of a model and of the scheduler, are checked where they meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from baton.core.errors import InvalidConfig


class Feature(Enum):
    """Feature that is in use, or an expected one that is not (NO_...)."""

    BATCH_INVARIANT = auto()
    TORCH_KERNELS = auto()
    FP8_KV = auto()
    ADAPTERS = auto()
    NO_ADAPTABLE_LAYERS = auto()
    NO_CHUNKED_PREFILL = auto()
    LONG_PREFILL_THRESHOLD = auto()
    NO_LONG_PREFILL_THRESHOLD = auto()
    MAX_LONG_PREFILLS = auto()
    TARGET_STEP_TIME = auto()
    NO_PREFIX_CACHING = auto()
    HOST_MEMORY_TIER = auto()
    NO_HOST_MEMORY_TIER = auto()
    BACKING_TIER = auto()
    KV_CONNECTOR = auto()
    NO_KV_CONNECTOR = auto()
    KV_CONNECTOR_CONFIG = auto()
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
        Feature.BATCH_INVARIANT,
        Feature.TORCH_KERNELS,
        "--batch-invariant: plain torch rounds sums by the size of the batch; use --kernels triton "
        "on a GPU, or native on a CPU",
    ),
    Exclusion(
        Feature.FP8_KV,
        Feature.GPU,
        "--kv-cache-dtype fp8 is for CPUs: kernels of GPUs (--device cuda, --kernels triton) read "
        "int8 and what the model computes in",
    ),
    Exclusion(
        Feature.LONG_PREFILL_THRESHOLD,
        Feature.NO_CHUNKED_PREFILL,
        "long_prefill_token_threshold needs enable_chunked_prefill",
    ),
    Exclusion(
        Feature.TARGET_STEP_TIME,
        Feature.NO_CHUNKED_PREFILL,
        "target_step_s needs enable_chunked_prefill",
    ),
    Exclusion(
        Feature.MAX_LONG_PREFILLS,
        Feature.NO_LONG_PREFILL_THRESHOLD,
        "max_long_partial_prefills needs long_prefill_token_threshold",
    ),
    Exclusion(
        Feature.BACKING_TIER,
        Feature.NO_HOST_MEMORY_TIER,
        "what is behind host memory, such as --kv-folder, needs --kv-host-memory, such as 1GiB: "
        "blocks wait there to be stored",
    ),
    Exclusion(
        Feature.KV_CONNECTOR,
        Feature.HOST_MEMORY_TIER,
        "--kv-host-memory is the KV connector `tiers`; leave out it or --kv-connector",
    ),
    Exclusion(
        Feature.KV_CONNECTOR_CONFIG,
        Feature.NO_KV_CONNECTOR,
        "kv-connector-config needs --kv-connector",
    ),
    Exclusion(
        Feature.KV_CONNECTOR,
        Feature.NO_PREFIX_CACHING,
        "--kv-connector cannot be used with prefix-caching = false",
    ),
    Exclusion(
        Feature.HOST_MEMORY_TIER,
        Feature.NO_PREFIX_CACHING,
        "--kv-host-memory cannot be used with prefix-caching = false",
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
