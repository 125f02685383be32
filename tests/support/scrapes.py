"""Metrics of processes, scraped over HTTP as by Prometheus."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from copy import copy
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.cluster import Child

METRICS_AT = re.compile(r"metrics on (http://\S+)")
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
MOST_SCRAPES = 500


def metrics_at(child: Child) -> str:
    address = METRICS_AT.search(child.log)
    assert address is not None, child.log
    return address[1]


def scraped(child: Child, is_wanted: Callable[[Scrape], bool]) -> Scrape:
    """Scrape until the result satisfies `is_wanted`, and return it."""
    for _ in range(MOST_SCRAPES):
        scrape = Scrape(child)
        if is_wanted(scrape):
            return scrape
    raise AssertionError(f"{child.name} never reported what was expected")


def plain_page(child: Child) -> str:
    """Return the metrics in Prometheus' text format, as schedulers read them."""
    with urllib.request.urlopen(metrics_at(child), timeout=10) as response:
        return str(response.read(), "utf-8")


class Scrape:
    """One scrape of a process."""

    def __init__(self, child: Child) -> None:
        request = urllib.request.Request(metrics_at(child), headers={"Accept": OPENMETRICS})
        with urllib.request.urlopen(request, timeout=10) as response:
            text = response.read().decode()
        parse: Any = text_string_to_metric_families
        families = parse(text)
        self.families: list[Metric] = list(families)
        self.samples: list[Sample] = [one for family in self.families for one in family.samples]

    def __sub__(self, before: Scrape) -> Scrape:
        """Return the increase of counters since another scrape."""
        since = copy(self)
        was = {(one.name, frozenset(one.labels.items())): one.value for one in before.samples}
        since.samples = [
            one._replace(value=one.value - was.get((one.name, frozenset(one.labels.items())), 0))
            for one in self.samples
        ]
        return since

    @property
    def exemplars(self) -> dict[str, str]:
        """Return the first series with an exemplar of each trace."""
        return {
            one.exemplar.labels["trace_id"]: one.name
            for one in reversed(self.samples)
            if one.exemplar
        }

    def total(self, name: str, **labels: str) -> float:
        found = [one for one in self.samples if one.name == name]
        return sum(one.value for one in found if labels.items() <= one.labels.items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        return {one.labels[label]: one.value for one in self.samples if one.name == name}
