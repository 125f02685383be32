"""How fast KV goes from one process to another here, by each transport: real bytes, measured."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from baton.doctor.findings import Finding, fail, ok, warn
from baton.doctor.wire_end import BLOCK_BYTES, NUM_BLOCKS, Said, serve_end

NUM_RUNS = 5
TLS = ("", "tcp")  # what UCX chooses, which is shared memory here, and what goes between machines
SLOW_GB_PER_S = 0.2
END_S = 2.0


class WireBroke(Exception):
    """A process of the measurement failed, ended or said nothing."""


@dataclass(frozen=True, slots=True)
class Way:
    transport: str
    tls: str  # what UCX may use; empty lets it choose

    @property
    def name(self) -> str:
        return f"{self.transport} over {self.tls or 'what UCX chooses'}"


def look_at_wire(transports: list[str], patience_s: float) -> Iterator[Finding]:
    """Both ways of each transport. What takes longer than the patience is ended and told of."""
    for transport in transports:
        ways = [Way(transport, tls) for tls in TLS]
        deadline_s = time.monotonic() + patience_s
        try:
            with _pair(deadline_s) as pair:
                for way in ways:
                    yield speed_finding(way, pair.measure(way))
                if pair.names:
                    yield ok("UCX has", ", ".join(pair.names))
        except WireBroke as broken:
            yield broken_finding(transport, str(broken))


def speed_finding(way: Way, gb_per_s: float) -> Finding:
    found = f"{gb_per_s:.2f} GB/s between two processes"
    if gb_per_s < SLOW_GB_PER_S:
        return warn(way.name, found, "hand-offs will be slow; baton bench kv tells more")
    return ok(way.name, found)


def broken_finding(transport: str, reason: str) -> Finding:
    if transport == "nixl":
        advice = "nodes cannot pass KV by it: look at UCX_* in the environment, or take ucxx"
        return fail("nixl", reason, advice)
    return warn(transport, reason, f"--kv-transport {transport} does not work here; nixl may")


class _Pair:
    def __init__(self, d: _Handle, p: _Handle) -> None:
        self._d, self._p = d, p
        self._num_tickets = 0
        self.names: list[str] = []  # of the ways that UCX has here, once one of them told

    def measure(self, way: Way) -> float:
        """The median, in GB/s; the first run connects and maps pages."""
        ours = self._d.ask("open", way.transport, way.tls)
        theirs = self._p.ask("open", way.transport, way.tls)
        self._d.ask("connect", *theirs)
        self._p.ask("connect", *ours)
        self._run()
        seconds = statistics.median(self._run() for _ in range(NUM_RUNS))
        self.names = self.names or self._d.ask("names")
        for end in (self._d, self._p):
            end.ask("close")
        return NUM_BLOCKS * BLOCK_BYTES / seconds / 1e9

    def _run(self) -> float:
        self._num_tickets += 1
        self._d.tell("take", self._num_tickets)
        seconds: float = self._p.ask("write", self._num_tickets)
        self._p.tell("rest")
        self._d.answer()
        self._p.tell("done")
        self._p.answer()
        self._p.answer()
        return seconds


class _Handle:
    """The parent's hold on one process."""

    def __init__(self, deadline_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._deadline_s = deadline_s
        self._process = context.Process(target=serve_end, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, command: str, *arguments: object) -> None:
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise WireBroke(self._how_it_ended()) from error

    def answer(self) -> Any:
        try:
            if not self._pipe.poll(max(0.0, self._deadline_s - time.monotonic())):
                raise WireBroke("it took too long; nothing came")
            said: Said = self._pipe.recv()
        except (EOFError, OSError):
            raise WireBroke(self._how_it_ended()) from None
        if said.error is not None:
            raise WireBroke(said.error)
        return said.value

    def ask(self, command: str, *arguments: object) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def close(self) -> None:
        """Killed only if it hangs: UCX tidies up its shared memory at the end."""
        self._pipe.close()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()

    def _how_it_ended(self) -> str:
        self._process.join(1)
        return f"a process that passes bytes ended with code {self._process.exitcode}"


@contextmanager
def _pair(deadline_s: float) -> Iterator[_Pair]:
    handles: list[_Handle] = []
    try:
        handles += [_Handle(deadline_s), _Handle(deadline_s)]
        for handle in handles:
            handle.answer()
        yield _Pair(*handles)
    finally:
        for handle in handles:
            handle.close()
