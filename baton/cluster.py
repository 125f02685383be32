"""A local cluster: router, prefill and decode nodes as child processes of this one."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.channel import open_blocking_channel
from serving.errors import ServiceError
from serving.server import parse_announcement
from serving.status import remote_error
from serving.tls import PLAIN, TlsConfig
from serving.tls_trouble import tls_trouble

LINES_KEPT = 40
LOGS_FOR_PEOPLE = ("--log-format", "text")  # they are shown, or told when a process fails
ERROR_PREFIX = "baton: error: "


class ClusterFailed(ServiceError):
    """A process of the cluster did not start, or ended before its time."""


def _ignore(_child: Child) -> None:
    """Nobody wants to know."""


def _ignore_line(_child: Child, _line: str) -> None:
    """Nobody wants to read it."""


def _where_it_listens(child: Child) -> str:
    return child.address


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    model: str
    num_prefill: int = 1
    num_decode: int = 1
    # No prefill nodes: as many nodes in all, and each does both.
    is_colocated: bool = False
    can_change: bool = False  # whether nodes may be added and removed while it runs
    host: str = "127.0.0.1"
    port: int = 0  # of the router; 0 takes any that is free
    program_arguments: tuple[str, ...] = ()  # of `baton` itself, in front of the command
    node_program: tuple[str, ...] = ()  # runs nodes instead of `python -m baton serve`
    node_arguments: tuple[str, ...] = ()  # given to each node as they are
    prefill_arguments: tuple[str, ...] = ()  # to each prefill node, behind those
    decode_arguments: tuple[str, ...] = ()
    router_arguments: tuple[str, ...] = ()
    tls: TlsConfig = PLAIN  # of every process
    start_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    show_logs: bool = False  # else the last lines are kept, for when a process fails
    environment: dict[str, str] = field(default_factory=dict)
    on_up: Callable[[Child], None] = _ignore  # it listens
    on_end: Callable[[Child], None] = _ignore  # its output is closed; on a thread of its own
    on_line: Callable[[Child, str], None] = _ignore_line  # of its log; on that thread, too
    found_at: Callable[[Child], str] = _where_it_listens  # where the router finds a node


class Child:
    """One process of the cluster, and what it said."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        options: ClusterOptions,
        on_settled: Callable[[Child], None] = _ignore,
    ) -> None:
        """`on_settled`: it listens, or ended before it did."""
        self.name = name
        self.arguments = tuple(arguments)
        self.address = ""
        self.http_address = ""  # of a router that has one
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._show_logs = options.show_logs
        self._announced = threading.Event()
        self._on_up, self._on_end, self._on_line = options.on_up, options.on_end, options.on_line
        self._on_settled = on_settled
        self._is_told = False
        self._drain_timeout_s = options.drain_timeout_s
        command = [*_command(options, arguments[0]), *arguments, "--parent-pid", str(os.getpid())]
        environment = {**os.environ, **options.environment}
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(started, command, environment), name=f"life of {name}"
        )
        self._thread.start()
        started.result()

    def _live(
        self,
        started: Future[None],
        command: Sequence[str],
        environment: dict[str, str],
    ) -> None:
        """On a thread of its own, since the system ends the child with the thread that made it."""
        try:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which drains in order
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            started.set_exception(error)
            return
        started.set_result(None)
        self._read()

    def await_address(self, timeout_s: float) -> str:
        """Where it listens, once it does. Raises ClusterFailed."""
        if not self._announced.wait(timeout_s):
            raise self.too_late(timeout_s)
        if not self.address:
            code = self.process.wait()
            raise ClusterFailed(self._why_not_up(code))
        self._on_up(self)
        return self.address

    def too_late(self, timeout_s: float) -> ClusterFailed:
        return ClusterFailed(f"{self.name} did not start within {timeout_s:.0f} s\n{self.log}")

    def _why_not_up(self, code: int) -> str:
        """Its own last word, if that was one; else all that it said."""
        last = self._lines[-1] if self._lines else ""
        if last.startswith(ERROR_PREFIX):
            return f"{self.name} did not start: {last.removeprefix(ERROR_PREFIX).strip()}"
        return f"{self.name} ended with code {code} at start\n{self.log}"

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def ask_to_stop(self) -> None:
        """Once: a second SIGTERM would end it before it has drained."""
        if not self._is_told and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self._is_told = True

    def stop(self) -> int:
        """Its exit code, once it has drained; killed if that takes too long."""
        self.ask_to_stop()
        try:
            code = self.process.wait(self._drain_timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._thread.join()
        return code

    def _read(self) -> None:
        """Runs until the process closes its output, which it does at its end at the latest."""
        stream = self.process.stdout
        if stream is None:
            return
        with stream:
            for line in stream:
                self._take(line)
        if not self._announced.is_set():
            self._settle()
        self._on_end(self)

    def _take(self, line: str) -> None:
        announced = parse_announcement(line)
        if announced is not None:
            self._note_address(*announced)
            return
        self._lines.append(line)
        self._on_line(self, line)
        # Of why it does not start, its parent tells (ClusterFailed): once, and not for each node.
        is_told_by_parent = not self.address and line.startswith(ERROR_PREFIX)
        if self._show_logs and not is_told_by_parent:
            print(f"[{self.name}] {line}", end="", file=sys.stderr)

    def _note_address(self, what: str, address: str) -> None:
        """A router tells of gRPC last, when all is there."""
        if what == "http":
            self.http_address = address
            return
        self.address = address
        self._settle()

    def _settle(self) -> None:
        self._announced.set()
        self._on_settled(self)


class NodeLists:
    """A list file for each role, read by the router again and again."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def source(self, role: str) -> str:
        return f"file://{self._folder / role}"

    def write(self, role: str, addresses: Sequence[str]) -> None:
        """As a whole: nobody reads half a list."""
        new = self._folder / f"{role}.new"
        new.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
        new.replace(self._folder / role)


class LocalCluster:
    """Up from `with` to the end of the block; then drained, router first."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._lifetime = ExitStack()
        self._lists: NodeLists | None = None
        self._numbers = {"prefill": itertools.count(), "decode": itertools.count()}
        self._spawned: list[Child] = []
        self._is_killed = False
        self._settled: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self.router: Child
        self.prefills: list[Child] = []
        self.decodes: list[Child] = []

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self._lifetime.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lifetime.close()

    @property
    def address(self) -> str:
        """Where clients find the router."""
        return self.router.address

    @property
    def children(self) -> list[Child]:
        return [self.router, *self.prefills, *self.decodes]

    def kill(self) -> None:
        """At once, whatever they are at. May be called by a signal handler."""
        self._is_killed = True
        for child in self._spawned:
            child.process.kill()

    def start_node(
        self, role: str, *, name: str = "", port: int = 0, arguments: tuple[str, ...] = ()
    ) -> Child:
        """A node that the router does not know yet. Raises ClusterFailed."""
        child = self._node(role, name, port, arguments)
        child.await_address(self._options.start_timeout_s)
        return child

    def add_node(self, role: str, child: Child) -> None:
        """From now on the router may find it."""
        self._nodes(role).append(child)
        self._write_list(role)

    def remove_node(self, child: Child) -> int:
        """Lists it no more and drains it. Its exit code."""
        role = "prefill" if child in self.prefills else "decode"
        self._nodes(role).remove(child)
        self._write_list(role)
        return child.stop()

    def restart(self, gone: Child) -> Child:
        """A new process for one that has ended, at the same address. Raises ClusterFailed."""
        port = gone.address.rpartition(":")[2]
        place = gone.arguments.index("--port") + 1
        arguments = (*gone.arguments[:place], port, *gone.arguments[place + 1 :])
        child = self._begin(gone.name, arguments)
        if gone is self.router:
            self.router = child
        else:
            siblings = self.prefills if gone in self.prefills else self.decodes
            siblings[siblings.index(gone)] = child
        child.await_address(self._options.start_timeout_s)
        return child

    def _start(self) -> None:
        options = self._options
        num_prefill, num_decode = options.num_prefill, options.num_decode
        if options.is_colocated:
            num_prefill, num_decode = 0, num_prefill + num_decode
        self.prefills = [self._node("prefill") for _ in range(num_prefill)]
        self.decodes = [self._node("decode") for _ in range(num_decode)]
        self._lifetime.callback(self._ask_nodes_to_stop)
        self._await_all((*self.prefills, *self.decodes))
        if options.can_change:
            self._lists = NodeLists(self._lifetime.enter_context(TemporaryDirectory()))
            for role in self._numbers:
                self._write_list(role)
        self.router = self._router()
        address = self.router.await_address(options.start_timeout_s)
        await_serving(address, options.start_timeout_s, options.tls)

    def _await_all(self, children: Sequence[Child]) -> None:
        """Returns when all listen. Raises ClusterFailed as soon as one has ended."""
        timeout_s = self._options.start_timeout_s
        end_s = time.monotonic() + timeout_s
        waiting = list(children)
        while waiting:
            try:
                child = self._settled.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise waiting[0].too_late(timeout_s) from None
            child.await_address(timeout_s)
            waiting.remove(child)

    def _nodes(self, role: str) -> list[Child]:
        return self.prefills if role == "prefill" else self.decodes

    def _write_list(self, role: str) -> None:
        """Without lists, the router knows the nodes it began with and no others."""
        if self._lists is not None:
            self._lists.write(role, [self._options.found_at(node) for node in self._nodes(role)])

    def _ask_nodes_to_stop(self) -> None:
        """All at once, when the router has ended; each is then waited for."""
        for node in (*self.prefills, *self.decodes):
            node.ask_to_stop()

    def _router(self) -> Child:
        options = self._options
        where = ["--host", options.host, "--port", str(options.port)]
        nodes = [
            argument
            for role in self._numbers
            if self._nodes(role)
            for argument in (f"--{role}-nodes", self._named(role))
        ]
        fixed = ["router", *LOGS_FOR_PEOPLE, "--model", options.model, *where, *nodes]
        return self._spawn("router", [*fixed, *options.router_arguments])

    def _named(self, role: str) -> str:
        """Where the router finds the nodes of this role."""
        if self._lists is not None:
            return self._lists.source(role)
        return ",".join(self._options.found_at(node) for node in self._nodes(role))

    def _node(
        self, role: str, name: str = "", port: int = 0, arguments: tuple[str, ...] = ()
    ) -> Child:
        name = name or f"{role}-{next(self._numbers[role])}"
        options = self._options
        where = ["--host", options.host, "--port", str(port)]
        fixed = [role, *LOGS_FOR_PEOPLE, "--model", options.model, *where, "--node-id", name]
        own = options.prefill_arguments if role == "prefill" else options.decode_arguments
        return self._spawn(name, [*fixed, *options.node_arguments, *own, *arguments])

    def _spawn(self, name: str, arguments: Sequence[str]) -> Child:
        return self._begin(name, [*arguments, *_tls_arguments(self._options.tls)])

    def _begin(self, name: str, arguments: Sequence[str]) -> Child:
        if self._is_killed:
            raise ClusterFailed("told to end before it was up")
        child = Child(name, arguments, self._options, self._settled.put)
        self._lifetime.callback(child.stop)
        self._spawned.append(child)
        return child


def _command(options: ClusterOptions, role: str) -> list[str]:
    if options.node_program and role != "router":
        return list(options.node_program)
    return [sys.executable, "-m", "baton", *options.program_arguments, "serve"]


def _tls_arguments(tls: TlsConfig) -> list[str]:
    given = {
        "--tls-cert": tls.cert,
        "--tls-key": tls.key,
        "--tls-ca": tls.ca,
        "--tls-client-ca": tls.client_ca,
        "--tls-server-name": tls.server_name or None,
    }
    return [f"{flag}={value}" for flag, value in given.items() if value is not None]


def await_serving(address: str, timeout_s: float, tls: TlsConfig = PLAIN) -> None:
    """Returns when the server, which listens already, can serve. Raises ClusterFailed."""
    with open_blocking_channel(address, tls) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        try:
            for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ClusterFailed(f"{address} was not ready within {timeout_s:.0f} s") from error
            reason = tls_trouble(address, tls) or remote_error(error).message
            raise ClusterFailed(f"{address} cannot be asked for its health: {reason}") from error
        finally:
            watch.cancel()
