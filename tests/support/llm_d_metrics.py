"""Gauges that llm-d's scheduler reads from `/metrics`, by the rules of its metric extractor.

Written after `extractor/metrics/` of llm-d-router (extractor.go, spec.go, loraspec.go) with the
names that factories.go has for the engine type `vllm`: one series of each family, the latest by
its time stamp, or the first; that of LoRA by its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

QUEUED, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"
KV_USAGE, CACHE = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
LORA = "vllm:lora_requests_info"


class NotExtracted(Exception):
    """The extractor would log an error at each scrape."""


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """State of a server, as scorers and filters of the scheduler use it."""

    waiting_queue_size: int
    running_requests_size: int
    kv_cache_usage: float  # 0 to 1
    cache_block_size: int
    cache_num_blocks: int
    max_active_models: int = 0  # without adapters, the family is missing
    active_models: frozenset[str] = frozenset()
    waiting_models: frozenset[str] = frozenset()


def extract(text: str) -> EndpointMetrics:
    """Return what is read from a page in Prometheus' text format. Raises NotExtracted."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    cache = _latest(families, CACHE).labels
    lora = families[LORA].samples if LORA in families else ()
    labels = max(lora, key=lambda sample: sample.value).labels if lora else {}
    return EndpointMetrics(
        int(_value(families, QUEUED)),
        int(_value(families, RUNNING)),
        _value(families, KV_USAGE),
        _number(cache, "block_size"),
        _number(cache, "num_gpu_blocks"),
        _number(labels, "max_lora"),
        _names(labels, "running_lora_adapters"),
        _names(labels, "waiting_lora_adapters"),
    )


def _latest(families: Mapping[str, Family], name: str) -> Sample:
    samples: Sequence[Sample] = families[name].samples if name in families else ()
    if not samples:
        raise NotExtracted(f"metric family {name!r} not found")
    return max(samples, key=lambda sample: sample.timestamp or 0)


def _value(families: Mapping[str, Family], name: str) -> float:
    """Return the value of a gauge or a counter; all others count as 0."""
    sample = _latest(families, name)
    return sample.value if families[name].type in ("gauge", "counter") else 0.0


def _number(labels: Mapping[str, str], name: str) -> int:
    written = labels.get(name, "")
    try:
        return int(written) if written else 0
    except ValueError:
        raise NotExtracted(f"label {name} is {written!r}") from None


def _names(labels: Mapping[str, str], name: str) -> frozenset[str]:
    return frozenset(each.strip() for each in labels.get(name, "").split(",") if each.strip())
