"""Measured KV transfer rate between two processes, for each transport."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from baton.doctor.findings import Finding, fail, ok, warn
from baton.doctor.wire_end import BLOCK_BYTES, NUM_BLOCKS, serve_end
from baton.measured_process import MeasuredProcess, MeasurementFailed

NUM_RUNS = 5
TLS = ("", "tcp")  # UCX_TLS: UCX's choice (shared memory on one machine), and TCP
SLOW_GB_PER_S = 0.2


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    transport: str
    tls: str  # UCX_TLS; empty for UCX's choice

    @property
    def name(self) -> str:
        return f"{self.transport} over {self.tls or 'what UCX chooses'}"


def check_transfer_rate(transports: Sequence[str], patience_s: float) -> Iterator[Finding]:
    """Measure each transport with UCX's choice and over TCP, within `patience_s` per transport."""
    for transport in transports:
        ways = [MeasuredPath(transport, tls) for tls in TLS]
        deadline_s = time.monotonic() + patience_s
        try:
            with _pair(deadline_s) as pair:
                for way in ways:
                    yield speed_finding(way, pair.measure(way))
                if pair.names:
                    yield ok("UCX has", ", ".join(pair.names))
        except MeasurementFailed as failure:
            yield failure_finding(transport, str(failure))


def speed_finding(way: MeasuredPath, gb_per_s: float) -> Finding:
    found = f"{gb_per_s:.2f} GB/s between two processes"
    if gb_per_s < SLOW_GB_PER_S:
        return warn(way.name, found, "hand-offs will be slow: see docs/handoff-figures.md")
    return ok(way.name, found)


def failure_finding(transport: str, reason: str) -> Finding:
    if transport == "nixl":
        advice = "nodes cannot transfer KV over it: check UCX_* in the environment, or use ucxx"
        return fail("nixl", reason, advice)
    return warn(transport, reason, f"--kv-transport {transport} does not work here; nixl may")


class _EndPair:
    def __init__(self, decode: MeasuredProcess, prefill: MeasuredProcess) -> None:
        self._decode, self._prefill = decode, prefill
        self._num_tickets = 0
        self.names: list[str] = []  # transports that UCX has here; empty until an end reported them

    def measure(self, way: MeasuredPath) -> float:
        """Return the median rate in GB/s. An unmeasured first run connects and maps pages."""
        decode_end = self._decode.call("open", way.transport, way.tls)
        prefill_end = self._prefill.call("open", way.transport, way.tls)
        self._decode.call("connect", *prefill_end)
        self._prefill.call("connect", *decode_end)
        self._run()
        seconds = statistics.median(self._run() for _ in range(NUM_RUNS))
        self.names = self.names or self._decode.call("names")
        for end in (self._decode, self._prefill):
            end.call("close")
        return NUM_BLOCKS * BLOCK_BYTES / seconds / 1e9

    def _run(self) -> float:
        self._num_tickets += 1
        self._decode.send("receive", self._num_tickets)
        seconds: float = self._prefill.call("write", self._num_tickets)
        self._prefill.send("progress")
        self._decode.receive()
        self._prefill.send("stop_progress")
        self._prefill.receive()
        self._prefill.receive()
        return seconds


@contextmanager
def _pair(deadline_s: float) -> Iterator[_EndPair]:
    def remaining_s() -> float:
        return max(0.0, deadline_s - time.monotonic())

    with ExitStack() as stack:
        ends = [
            stack.enter_context(closing(MeasuredProcess(serve_end, remaining_s=remaining_s)))
            for _ in range(2)
        ]
        for end in ends:
            end.receive()
        yield _EndPair(*ends)
