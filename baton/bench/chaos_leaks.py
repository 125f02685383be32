"""What processes hold, as they and the system tell it, and what of that should not be held."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from telemetry import metric_names as names
from telemetry.metric_names import Metric

SCRAPE_TIMEOUT_S = 5.0
SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
# Held by nobody when nothing is under way, and what it is called then.
HELD = (
    (names.RUNNING, "", "requests in the batch"),
    (names.WAITING, "", "requests that wait"),
    (names.OPEN_HANDOFFS, "", "open hand-offs"),
    (names.BLOCKS, "granted", "granted blocks"),
    (names.BLOCKS, "fenced", "fenced blocks"),
    (names.BLOCKS, "owned", "owned blocks"),
    (names.IN_FLIGHT, "", "requests in flight"),
    (names.QUEUE_DEPTH, "", "requests in line"),
)
# gRPC's and the system's own threads and descriptors come and go by a few.
SPARE = 3


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one process at one moment."""

    value_by_sample: dict[tuple[str, str], float]

    def total(self, metric: Metric, label: str = "") -> float:
        """Over all samples that carry this label's value, or over all."""
        known = {metric.prometheus, f"{metric.prometheus}_total"}
        return sum(
            value
            for (name, labels), value in self.value_by_sample.items()
            if name in known and (not label or f'"{label}"' in labels)
        )


def scrape(url: str) -> Scrape:
    """Raises OSError when nobody answers."""
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
        return parse(answer.read().decode())


def parse(text: str) -> Scrape:
    samples = (SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
    return Scrape(
        {(one["name"], one["labels"] or ""): float(one["value"]) for one in samples if one}
    )


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the system holds for a process."""

    num_descriptors: int
    num_threads: int
    rss_bytes: int


def footprint(pid: int) -> Footprint:
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text(encoding="ascii").split()[1])
    return Footprint(
        len(os.listdir(process / "fd")),
        len(os.listdir(process / "task")),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


def held(found: Scrape) -> Iterator[str]:
    """What a process holds for requests, of which there are none."""
    for metric, label, name in HELD:
        count = found.total(metric, label)
        if count:
            yield f"{count:.0f} {name}"


def grown(before: Footprint, after: Footprint) -> Iterator[str]:
    for name, called in (("num_descriptors", "descriptors"), ("num_threads", "threads")):
        more = getattr(after, name) - getattr(before, name)
        if more > SPARE:
            yield f"{more} more {called} than the {getattr(before, name)} at the start"
