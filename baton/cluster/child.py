"""Child processes of a local cluster: started, watched through their output, drained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.fork_server import ClusterFailed, ForkServer
from baton.rpc.server import parse_announcement

MAX_LOG_LINES = 40
ERROR_PREFIX = "baton: error: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    """Programs, environment, logs and callbacks of the processes."""

    program_arguments: tuple[str, ...] = ()  # options of `baton` itself, before the command
    node_program: tuple[str, ...] = ()  # module that runs nodes instead of `baton serve`
    drain_timeout_s: float = 30.0
    show_logs: bool = False  # if not, the last lines are kept for the error of a failed process
    environment: dict[str, str] = field(default_factory=dict)
    on_up: Callable[[Child], None] = lambda _child: None  # called once it listens
    # Called on the reader thread: at the end of the output, and for each line of the log.
    on_end: Callable[[Child], None] = lambda _child: None
    on_line: Callable[[Child, str], None] = lambda _child, _line: None

    def command(self, role: str) -> list[str]:
        """Return the module that serves this role, and its first arguments."""
        if self.node_program and role != "router":
            return list(self.node_program)
        return ["baton", *self.program_arguments, "serve"]


class Child:
    """Child process of the cluster and the tail of its log."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        options: ChildOptions,
        forks: ForkServer,
        on_settled: Callable[[Child], None] = lambda _child: None,
    ) -> None:
        """`on_settled` is called when the process listens, or has ended without listening."""
        self.name = name
        self.arguments = tuple(arguments)
        self.address = ""
        self.http_address = ""  # of a router with --http-port
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self.options = options
        self._announced = threading.Event()
        self._on_settled = on_settled
        self._is_stopping = False
        command = [*options.command(arguments[0]), *arguments, "--parent-pid", str(os.getpid())]
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run_process, args=(started, forks, command), name=f"process {name}"
        )
        self._thread.start()
        started.result()

    def _run_process(
        self, started: Future[None], forks: ForkServer, command: Sequence[str]
    ) -> None:
        """Start the process and read its output, on the reader thread."""
        try:
            self.process = forks.start(command)
        except (OSError, ClusterFailed) as error:
            started.set_exception(error)
            return
        started.set_result(None)
        self._read()

    def await_address(self, timeout_s: float) -> str:
        """Wait until the process listens and return its address. Raises ClusterFailed."""
        if not self._announced.wait(timeout_s):
            raise self.start_timeout_error(timeout_s)
        if not self.address:
            code = self.process.wait()
            raise ClusterFailed(self.end_message(code))
        self.options.on_up(self)
        return self.address

    def start_timeout_error(self, timeout_s: float) -> ClusterFailed:
        return ClusterFailed(f"{self.name} did not start within {timeout_s:.0f} s\n{self.log}")

    def end_message(self, code: int) -> str:
        """Return how the process ended: at start with its last error, or the tail of its log."""
        if self.address:
            return f"{self.name} ended with code {code}"
        last = self._lines[-1] if self._lines else ""
        if last.startswith(ERROR_PREFIX):
            return f"{self.name} did not start: {last.removeprefix(ERROR_PREFIX).strip()}"
        return f"{self.name} ended with code {code} at start\n{self.log}"

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def request_stop(self) -> None:
        """Send SIGTERM, once only: a second one would end the process before it has drained."""
        if not self._is_stopping and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self._is_stopping = True

    def stop(self) -> int:
        """Drain the process, kill it if that takes too long, and return its exit code."""
        self.request_stop()
        try:
            code = self.process.wait(self.options.drain_timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._thread.join()
        return code

    def _read(self) -> None:
        """Read until the process closes its output, at the latest when it ends."""
        with self.process.stdout as lines:
            for line in lines:
                self._take_line(line)
        if not self._announced.is_set():
            self._settle()
        self.options.on_end(self)

    def _take_line(self, line: str) -> None:
        announced = parse_announcement(line)
        if announced is not None:
            self._note_address(*announced)
            return
        self._lines.append(line)
        # Start errors are reported by ClusterFailed: once, rather than once per node.
        is_start_error = not self.address and line.startswith(ERROR_PREFIX)
        if self.options.show_logs and not is_start_error:
            print(f"[{self.name}] {line}", end="", file=sys.stderr)
        self.options.on_line(self, line)

    def _note_address(self, protocol: str, address: str) -> None:
        """Store an announced address. A router announces gRPC last, when it is complete."""
        if protocol == "http":
            self.http_address = address
            return
        self.address = address
        self._settle()

    def _settle(self) -> None:
        self._announced.set()
        self._on_settled(self)
