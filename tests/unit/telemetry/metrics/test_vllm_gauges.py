"""Gauges under vLLM's names, read by the rules of the gateway API's metric extractor."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.instruments import Reading, exposition
from baton.telemetry.metrics.vllm_gauges import AdaptersInUse, VllmGauges

READING: Reading = {
    counted.RUNNING: 3,
    counted.WAITING: {"waiting": 2, "ready": 1, "waiting_for_fsm": 0},
    counted.BLOCKS: {"free": 10, "cached": 20, "granted": 4, "fenced": 1, "owned": 5},
}


def extracted(gauges: VllmGauges) -> dict[str, tuple[dict[str, str], float]]:
    """Return label and value of each name; the extractor takes exactly one series of a gauge."""
    registry = CollectorRegistry()
    registry.register(gauges)
    text, _ = exposition(registry, "text/plain")
    found: dict[str, tuple[dict[str, str], float]] = {}
    families: list[Family] = list(text_string_to_metric_families(text.decode()))
    for family in families:
        assert family.type == "gauge"
        [sample] = family.samples
        found[sample.name] = sample.labels, sample.value
    return found


def test_each_gauge_has_one_series_with_the_labels_of_vllm() -> None:
    in_use = AdaptersInUse(("sql", "chat"), ("late",))
    found = extracted(VllmGauges(lambda: READING, 16, 4, lambda: in_use))

    plain = {name: value for name, (labels, value) in found.items() if not labels}
    assert plain == {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
    }
    labels, _ = found["vllm:cache_config_info"]
    assert {name: int(value) for name, value in labels.items()} == {
        "block_size": 16,
        "num_gpu_blocks": 40,
    }
    labels, time_s = found["vllm:lora_requests_info"]
    assert labels["running_lora_adapters"].split(",") == ["sql", "chat"]
    assert labels["waiting_lora_adapters"] == "late"
    assert int(labels["max_lora"]) == 4
    assert time_s > 1e9


def test_nothing_is_reported_before_the_first_reading_or_without_adapters() -> None:
    assert extracted(VllmGauges(dict, 16)) == {}
    assert "vllm:lora_requests_info" not in extracted(VllmGauges(lambda: READING, 16))
