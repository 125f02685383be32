"""Gauges under vLLM's names, for schedulers such as llm-d that read one series of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.instruments import Read

UNUSED_STATES = ("free", "cached")


class AdaptersInUse(NamedTuple):
    """Names of adapters that requests use."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VllmGauges(Collector):
    """Collector that derives vLLM's gauges from a node's reading."""

    read: Read
    block_size: int
    max_loras: int = 0  # 0: no adapters
    adapters: Callable[[], AdaptersInUse] = AdaptersInUse

    def collect(self) -> Iterator[Family]:
        """Yield nothing before the first reading of the engine."""
        reading = self.read()
        waiting, blocks = reading.get(counted.WAITING), reading.get(counted.BLOCKS)
        if not isinstance(waiting, Mapping) or not isinstance(blocks, Mapping):
            return
        num_blocks = sum(blocks.values())
        unused = sum(blocks[state] for state in UNUSED_STATES)
        running = reading[counted.RUNNING]
        assert not isinstance(running, Mapping)
        yield _gauge("num_requests_running", "Requests in the batch.", running)
        yield _gauge("num_requests_waiting", "Requests that wait.", sum(waiting.values()))
        usage = 1 - unused / num_blocks if num_blocks else 0.0
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        facts = {"block_size": str(self.block_size), "num_gpu_blocks": str(round(num_blocks))}
        yield _gauge("cache_config_info", "Size of the KV cache.", 1, facts)
        if self.max_loras:
            yield self._lora_info()

    def describe(self) -> tuple[Family, ...]:
        return ()

    def _lora_info(self) -> Family:
        in_use = self.adapters()
        labels = {
            "max_lora": str(self.max_loras),
            "running_lora_adapters": ",".join(in_use.running),
            "waiting_lora_adapters": ",".join(in_use.waiting),
        }
        text = "Adapters that requests use. The value is the time of the reading."
        return _gauge("lora_requests_info", text, time.time(), labels)


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Family:
    labels = labels or {}
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family
