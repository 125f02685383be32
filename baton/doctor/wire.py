"""Measured KV transfer rate between two processes, for each transport."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from baton.doctor.findings import Finding, fail, ok, warn
from baton.doctor.wire_end import BLOCK_BYTES, NUM_BLOCKS, EndReply, serve_end

NUM_RUNS = 5
TLS = ("", "tcp")  # UCX_TLS: UCX's choice (shared memory on one machine), and TCP
SLOW_GB_PER_S = 0.2
END_S = 2.0


class MeasurementFailed(Exception):
    """A process of the measurement failed, ended or timed out."""


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
        return warn(way.name, found, "hand-offs will be slow; baton bench kv measures more")
    return ok(way.name, found)


def failure_finding(transport: str, reason: str) -> Finding:
    if transport == "nixl":
        advice = "nodes cannot transfer KV over it: check UCX_* in the environment, or use ucxx"
        return fail("nixl", reason, advice)
    return warn(transport, reason, f"--kv-transport {transport} does not work here; nixl may")


class _EndPair:
    def __init__(self, decode: _EndHandle, prefill: _EndHandle) -> None:
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


class _EndHandle:
    """Handle of one process of the measurement."""

    def __init__(self, deadline_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, child_pipe = context.Pipe()
        self._deadline_s = deadline_s
        self._process = context.Process(target=serve_end, args=(child_pipe,), daemon=True)
        self._process.start()
        child_pipe.close()

    def send(self, command: str, *arguments: object) -> None:
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise MeasurementFailed(self._exit_message()) from error

    def receive(self) -> Any:
        try:
            if not self._pipe.poll(max(0.0, self._deadline_s - time.monotonic())):
                raise MeasurementFailed("it took too long")
            reply: EndReply = self._pipe.recv()
        except (EOFError, OSError):
            raise MeasurementFailed(self._exit_message()) from None
        if reply.error is not None:
            raise MeasurementFailed(reply.error)
        return reply.value

    def call(self, command: str, *arguments: object) -> Any:
        self.send(command, *arguments)
        return self.receive()

    def close(self) -> None:
        """End the process. It is killed only if it hangs: UCX frees its shared memory at exit."""
        self._pipe.close()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()

    def _exit_message(self) -> str:
        self._process.join(1)
        return f"a process of the measurement ended with code {self._process.exitcode}"


@contextmanager
def _pair(deadline_s: float) -> Iterator[_EndPair]:
    handles: list[_EndHandle] = []
    try:
        handles += [_EndHandle(deadline_s), _EndHandle(deadline_s)]
        for handle in handles:
            handle.receive()
        yield _EndPair(*handles)
    finally:
        for handle in handles:
            handle.close()
