"""Gauges under vLLM's names, as llm-d's scheduler reads them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.instruments import AdaptersInUse, Reading, VllmGauges, exposition
from tests.support.llm_d_metrics import EndpointMetrics, NotExtracted, extract

READING: Reading = {
    counted.RUNNING: 3,
    counted.WAITING: {"waiting": 2, "ready": 1, "waiting_for_fsm": 0},
    counted.BLOCKS: {"free": 10, "cached": 20, "granted": 4, "fenced": 1, "owned": 5},
}
EXTRACTED = EndpointMetrics(3, 3, 0.25, 16, 40)


def page(gauges: VllmGauges) -> str:
    registry = CollectorRegistry()
    registry.register(gauges)
    text, _ = exposition(registry, "text/plain")
    return text.decode()


def test_schedulers_read_load_cache_and_adapters() -> None:
    in_use = AdaptersInUse(("sql", "chat"), ("late",))
    text = page(VllmGauges(lambda: READING, 16, 4, lambda: in_use))

    assert extract(text) == EndpointMetrics(
        3, 3, 0.25, 16, 40, 4, frozenset(in_use.running), frozenset(in_use.waiting)
    )
    families = list(text_string_to_metric_families(text))
    assert {(family.type, len(family.samples)) for family in families} == {("gauge", 1)}
    [lora] = [family for family in families if family.name == "vllm:lora_requests_info"]
    assert lora.samples[0].value > 1e9  # the time: of several series, the last one counts


def test_nothing_is_reported_before_the_first_reading_or_without_adapters() -> None:
    assert not page(VllmGauges(dict, 16))
    with pytest.raises(NotExtracted, match="cache_config_info"):
        extract(page(VllmGauges(dict, 16)))
    assert extract(page(VllmGauges(lambda: READING, 16))) == EXTRACTED
