"""Leak detection: resources and memory of processes from their metrics and from /proc."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from telemetry.metrics import names
from telemetry.metrics.names import Metric

SCRAPE_TIMEOUT_S = 5.0
SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
# Metrics that are 0 without requests, with their names in reports.
HELD = (
    (names.RUNNING, "", "requests in the batch"),
    (names.WAITING, "", "waiting requests"),
    (names.OPEN_HANDOFFS, "", "open hand-offs"),
    (names.BLOCKS, "granted", "granted blocks"),
    (names.BLOCKS, "fenced", "fenced blocks"),
    (names.BLOCKS, "owned", "owned blocks"),
    (names.IN_FLIGHT, "", "requests in flight"),
    (names.QUEUE_DEPTH, "", "queued requests"),
)
# Tolerance for descriptors of gRPC and the system.
SPARE_DESCRIPTORS = 3
# Of a control link and its data path. Nodes link at their first pull from each other, too.
DESCRIPTORS_PER_LINK = 12
# Thread pools start their threads at first use: asyncio's default executor has up to 6 on two
# cores, and gRPC, the grammar compiler and the pool for large bodies have a few each.
SPARE_THREADS = 12
MAX_GROWTH = 0.2  # of resident memory in the second half of a run
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metric samples of one process."""

    value_by_sample: dict[tuple[str, str], float]

    def total(self, metric: Metric, label: str = "") -> float:
        """Sum a metric over its samples, or over those with this label value."""
        known = {metric.prometheus, f"{metric.prometheus}_total"}
        return sum(
            value
            for (name, labels), value in self.value_by_sample.items()
            if name in known and (not label or f'"{label}"' in labels)
        )


def scrape(url: str) -> Scrape:
    """Read the metrics. Raises OSError if the process does not answer."""
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
        return parse(answer.read().decode())


def parse(text: str) -> Scrape:
    samples = (SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
    return Scrape(
        {(one["name"], one["labels"] or ""): float(one["value"]) for one in samples if one}
    )


@dataclass(frozen=True, slots=True)
class Footprint:
    """System resources of a process."""

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
    """Yield what a process still holds for requests when there are none."""
    for metric, label, name in HELD:
        count = found.total(metric, label)
        if count:
            yield f"{count:.0f} {name}"


def num_links(found: Scrape) -> int:
    return int(found.total(names.LINKS, "up"))


def grown(before: Footprint, after: Footprint, num_new_links: int = 0) -> Iterator[str]:
    """Yield what a process has more of than at the start, apart from new links to peers."""
    for_links = DESCRIPTORS_PER_LINK * max(0, num_new_links)
    for name, label, spare in (
        ("num_descriptors", "descriptors", SPARE_DESCRIPTORS + for_links),
        ("num_threads", "threads", SPARE_THREADS),
    ):
        more = getattr(after, name) - getattr(before, name)
        if more > spare:
            yield f"{more} more {label} than the {getattr(before, name)} at the start"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident memory of a process that ran from the middle of the run to its end."""

    process: str
    start_mib: float | None  # None: restarted since
    middle_mib: float
    end_mib: float

    @property
    def growth(self) -> float:
        return self.end_mib / self.middle_mib - 1

    @property
    def is_within(self) -> bool:
        return self.growth <= MAX_GROWTH


Rss = Mapping[str, tuple[int, int]]  # pid and bytes by process name


def memory_growth(start: Rss, middle: Rss, end: Rss) -> list[ProcessMemory]:
    """Return the memory of the processes that ran both in the middle and at the end."""
    return [
        ProcessMemory(
            name,
            start[name][1] / MIB if name in start and start[name][0] == pid else None,
            middle[name][1] / MIB,
            num_bytes / MIB,
        )
        for name, (pid, num_bytes) in end.items()
        if name in middle and middle[name][0] == pid
    ]
