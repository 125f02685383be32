"""Leak detection: resources and memory of processes from their metrics and from /proc."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.kv_transfer.transports.dead_segments import MIN_AGE_S, SHARED_MEMORY
from baton.telemetry.metrics import names
from baton.telemetry.metrics.names import Metric

SCRAPE_TIMEOUT_S = 5.0
SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
NUMBER = re.compile(r"[0-9a-f]{5,}|[0-9]+")  # such as that of a socket or of UCX's shared memory
# Metrics that are 0 without requests, with their names in reports.
HELD = (
    (names.RUNNING, "", "requests in the batch"),
    (names.WAITING, "", "waiting requests"),
    (names.OPEN_HANDOFFS, "", "open hand-offs"),
    (names.BLOCKS, "granted", "granted blocks"),
    (names.BLOCKS, "fenced", "fenced blocks"),
    (names.BLOCKS, "owned", "owned blocks"),
    (names.ENCODER_ROWS, "", "rows of encodings"),
    (names.IN_FLIGHT, "", "requests in flight"),
    (names.QUEUE_DEPTH, "", "queued requests"),
    (names.ADAPTER_WAITING, "", "requests that wait for adapters"),
    (names.ADAPTERS, "in_use", "adapters in use"),
    (names.ADAPTERS, "reading", "adapters being read"),
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

    descriptors: Counter[str]  # by kind
    num_threads: int
    rss_bytes: int

    @property
    def num_descriptors(self) -> int:
        return self.descriptors.total()


def footprint(pid: int, pooled_ports: Collection[int] = ()) -> Footprint:
    """Return the resources of a process, without its connections to these ports."""
    process = Path(f"/proc/{pid}")
    return Footprint(
        _descriptors(process, pooled_ports),
        len(os.listdir(process / "task")),
        resident_bytes(pid),
    )


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has just ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _descriptors(process: Path, pooled_ports: Collection[int]) -> Counter[str]:
    port_by_socket = _remote_ports(process)
    kinds: Counter[str] = Counter()
    for entry in os.scandir(process / "fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = os.readlink(entry.path)
            port = port_by_socket.get(target)
            if port is None:
                kinds[NUMBER.sub("N", target)] += 1
            elif port not in pooled_ports:
                kinds["TCP connection" if port else "TCP listener"] += 1
    return kinds


def _remote_ports(process: Path) -> dict[str, int]:
    """Return the remote ports of TCP sockets by `socket:[inode]`; 0: it listens."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in (process / "net" / table).read_text(encoding="ascii").splitlines()[1:]
    ]
    return {f"socket:[{line[9]}]": int(line[2].rpartition(":")[2], 16) for line in lines}


def held(found: Scrape) -> Iterator[str]:
    """Yield resources that a process still holds for requests when there are none."""
    for metric, label, name in HELD:
        count = found.total(metric, label)
        if count:
            yield f"{count:.0f} {name}"


def named_memory(folder: Path = SHARED_MEMORY) -> set[str]:
    """Return the names of shared memory. UCX keeps a name for milliseconds: those are left out."""
    found = set()
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it was unlinked meanwhile
                if time.time() - entry.stat().st_mtime > MIN_AGE_S:
                    found.add(entry.name)
    return found


def num_links(found: Scrape) -> int:
    return int(found.total(names.LINKS, "up"))


def num_adapters(found: Scrape) -> int:
    """Return the number of names of adapters."""
    return int(found.total(names.ADAPTERS, "named"))


def may_have_grown(before: Footprint, pid: int, num_new_links: int = 0) -> bool:
    """Return False if `grown` yields nothing for this process.

    Pooled connections are counted. To tell them apart, a footprint reads the system's tables of all
    connections, which takes milliseconds.
    """
    process = Path(f"/proc/{pid}")
    num_descriptors = len(os.listdir(process / "fd"))
    return (
        num_descriptors > before.num_descriptors + _spare_descriptors(num_new_links)
        or len(os.listdir(process / "task")) > before.num_threads + SPARE_THREADS
    )


def grown(before: Footprint, after: Footprint, num_new_links: int = 0) -> Iterator[str]:
    """Yield resources that have grown since the start, apart from new links to peers."""
    more = after.num_descriptors - before.num_descriptors
    if more > _spare_descriptors(num_new_links):
        grown_kinds = (after.descriptors - before.descriptors).most_common()
        kinds = ", ".join(f"{count} {kind}" for kind, count in grown_kinds)
        yield f"{more} more descriptors than the {before.num_descriptors} at the start: {kinds}"
    more = after.num_threads - before.num_threads
    if more > SPARE_THREADS:
        yield f"{more} more threads than the {before.num_threads} at the start"


def _spare_descriptors(num_new_links: int) -> int:
    return SPARE_DESCRIPTORS + DESCRIPTORS_PER_LINK * max(0, num_new_links)


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
