"""Local cluster: router, prefill and decode nodes as child processes."""

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

from errors import NamedError
from rpc.channel import open_blocking_channel
from rpc.security.tls import PLAIN, TlsConfig
from rpc.security.tls_diagnosis import tls_trouble
from rpc.server import parse_announcement
from rpc.status import remote_error

MAX_LOG_LINES = 40
TEXT_LOGS = ("--log-format", "text")  # shown, or part of the error when a process fails
ERROR_PREFIX = "baton: error: "


class ClusterFailed(NamedError):
    """A process of the cluster did not start, or ended too early."""


def _ignore(_child: Child) -> None:
    """Default of `on_up` and `on_end`."""


def _ignore_line(_child: Child, _line: str) -> None:
    """Default of `on_line`."""


def _listen_address(child: Child) -> str:
    return child.address


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    model: str
    num_prefill: int = 1
    num_decode: int = 1
    # No prefill nodes: num_prefill + num_decode decode nodes, which also compute the prompts.
    is_colocated: bool = False
    can_change: bool = False  # nodes can be added and removed while it runs
    host: str = "127.0.0.1"
    port: int = 0  # of the router; 0 takes any free port
    program_arguments: tuple[str, ...] = ()  # options of `baton` itself, before the command
    node_program: tuple[str, ...] = ()  # starts nodes instead of `python -m baton serve`
    node_arguments: tuple[str, ...] = ()  # passed to every node
    prefill_arguments: tuple[str, ...] = ()  # passed to every prefill node, after node_arguments
    decode_arguments: tuple[str, ...] = ()
    router_arguments: tuple[str, ...] = ()
    tls: TlsConfig = PLAIN  # of every process
    start_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    show_logs: bool = False  # if not, the last lines are kept for the error of a failed process
    environment: dict[str, str] = field(default_factory=dict)
    on_up: Callable[[Child], None] = _ignore  # called once it listens
    # Called on the reader thread: at the end of the output, and for each line of the log.
    on_end: Callable[[Child], None] = _ignore
    on_line: Callable[[Child, str], None] = _ignore_line
    router_target_of: Callable[[Child], str] = (
        _listen_address  # where the router connects to a node
    )


class Child:
    """Child process of the cluster and the tail of its log."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        options: ClusterOptions,
        on_settled: Callable[[Child], None] = _ignore,
    ) -> None:
        """`on_settled` is called when the process listens, or has ended without listening."""
        self.name = name
        self.arguments = tuple(arguments)
        self.address = ""
        self.http_address = ""  # of a router with --http-port
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._show_logs = options.show_logs
        self._announced = threading.Event()
        self._on_up, self._on_end, self._on_line = options.on_up, options.on_end, options.on_line
        self._on_settled = on_settled
        self._is_stopping = False
        self._drain_timeout_s = options.drain_timeout_s
        command = [*_command(options, arguments[0]), *arguments, "--parent-pid", str(os.getpid())]
        environment = {**os.environ, **options.environment}
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run_process, args=(started, command, environment), name=f"process {name}"
        )
        self._thread.start()
        started.result()

    def _run_process(
        self,
        started: Future[None],
        command: Sequence[str],
        environment: dict[str, str],
    ) -> None:
        """Start the process and read its output, on the reader thread.

        The child is killed when the thread that started it ends (PR_SET_PDEATHSIG), so this
        thread lives as long as the child.
        """
        try:
            self.process = start_process(command, environment)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
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
            raise ClusterFailed(self._start_error(code))
        self._on_up(self)
        return self.address

    def start_timeout_error(self, timeout_s: float) -> ClusterFailed:
        return ClusterFailed(f"{self.name} did not start within {timeout_s:.0f} s\n{self.log}")

    def _start_error(self, code: int) -> str:
        """Return the error that the process printed last; without one, the tail of its log."""
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
            code = self.process.wait(self._drain_timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._thread.join()
        return code

    def _read(self) -> None:
        """Read until the process closes its output, at the latest when it ends."""
        stream = self.process.stdout
        if stream is None:
            return
        with stream:
            for line in stream:
                self._take_line(line)
        if not self._announced.is_set():
            self._settle()
        self._on_end(self)

    def _take_line(self, line: str) -> None:
        announced = parse_announcement(line)
        if announced is not None:
            self._note_address(*announced)
            return
        self._lines.append(line)
        self._on_line(self, line)
        # Start errors are reported by ClusterFailed: once, rather than once per node.
        is_start_error = not self.address and line.startswith(ERROR_PREFIX)
        if self._show_logs and not is_start_error:
            print(f"[{self.name}] {line}", end="", file=sys.stderr)

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


def start_process(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a process with both outputs in one pipe. Tests replace this by a fork."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches only the parent, which drains in order
    )


class NodeLists:
    """Node list files, one per role, which the router polls."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def source(self, role: str) -> str:
        return f"file://{self._folder / role}"

    def write(self, role: str, addresses: Sequence[str]) -> None:
        """Replace the list atomically, so that the router never reads half a list."""
        new = self._folder / f"{role}.new"
        new.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
        new.replace(self._folder / role)


class LocalCluster:
    """Cluster that starts at `with` and drains at the end of the block, router first."""

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
        """Address of the router, for clients."""
        return self.router.address

    @property
    def children(self) -> list[Child]:
        return [self.router, *self.prefills, *self.decodes]

    def kill(self) -> None:
        """Kill all processes without draining. Safe in a signal handler."""
        self._is_killed = True
        for child in self._spawned:
            child.process.kill()

    def start_node(
        self, role: str, *, name: str = "", port: int = 0, arguments: tuple[str, ...] = ()
    ) -> Child:
        """Start a node without listing it for the router. Raises ClusterFailed."""
        child = self._spawn_node(role, name, port, arguments)
        child.await_address(self._options.start_timeout_s)
        return child

    def add_node(self, role: str, child: Child) -> None:
        """List a started node, so that the router connects to it."""
        self._nodes(role).append(child)
        self._write_list(role)

    def remove_node(self, child: Child) -> int:
        """Unlist a node, drain it and return its exit code."""
        role = "prefill" if child in self.prefills else "decode"
        self._nodes(role).remove(child)
        self._write_list(role)
        return child.stop()

    def restart(self, ended: Child) -> Child:
        """Start a new process at the addresses of one that has ended. Raises ClusterFailed."""
        arguments = with_port(ended.arguments, "--port", ended.address)
        arguments = with_port(arguments, "--http-port", ended.http_address)
        child = self._start_child(ended.name, arguments)
        if ended is self.router:
            self.router = child
        else:
            siblings = self.prefills if ended in self.prefills else self.decodes
            siblings[siblings.index(ended)] = child
        child.await_address(self._options.start_timeout_s)
        return child

    def _start(self) -> None:
        options = self._options
        num_prefill, num_decode = options.num_prefill, options.num_decode
        if options.is_colocated:
            num_prefill, num_decode = 0, num_prefill + num_decode
        self.prefills = [self._spawn_node("prefill") for _ in range(num_prefill)]
        self.decodes = [self._spawn_node("decode") for _ in range(num_decode)]
        self._lifetime.callback(self._ask_nodes_to_stop)
        self._await_all((*self.prefills, *self.decodes))
        if options.can_change:
            self._lists = NodeLists(self._lifetime.enter_context(TemporaryDirectory()))
            for role in self._numbers:
                self._write_list(role)
        self.router = self._spawn_router()
        address = self.router.await_address(options.start_timeout_s)
        await_serving(address, options.start_timeout_s, options.tls)

    def _await_all(self, children: Sequence[Child]) -> None:
        """Wait until all processes listen. Raises ClusterFailed as soon as one has ended."""
        timeout_s = self._options.start_timeout_s
        end_s = time.monotonic() + timeout_s
        waiting = list(children)
        while waiting:
            try:
                child = self._settled.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise waiting[0].start_timeout_error(timeout_s) from None
            child.await_address(timeout_s)
            waiting.remove(child)

    def _nodes(self, role: str) -> list[Child]:
        return self.prefills if role == "prefill" else self.decodes

    def _write_list(self, role: str) -> None:
        """Write the list file of `role`. Without list files, the nodes are fixed."""
        if self._lists is not None:
            self._lists.write(
                role, [self._options.router_target_of(node) for node in self._nodes(role)]
            )

    def _ask_nodes_to_stop(self) -> None:
        """Send SIGTERM to all nodes at once, after the router has ended; `stop` then waits."""
        for node in (*self.prefills, *self.decodes):
            node.request_stop()

    def _spawn_router(self) -> Child:
        options = self._options
        listen = ["--host", options.host, "--port", str(options.port)]
        nodes = [
            argument
            for role in self._numbers
            if self._nodes(role)
            for argument in (f"--{role}-nodes", self._nodes_option(role))
        ]
        common = ["router", *TEXT_LOGS, "--model", options.model, *listen, *nodes]
        return self._spawn("router", [*common, *options.router_arguments])

    def _nodes_option(self, role: str) -> str:
        """Return the value of the router's option for the nodes of this role."""
        if self._lists is not None:
            return self._lists.source(role)
        return ",".join(self._options.router_target_of(node) for node in self._nodes(role))

    def _spawn_node(
        self, role: str, name: str = "", port: int = 0, arguments: tuple[str, ...] = ()
    ) -> Child:
        name = name or f"{role}-{next(self._numbers[role])}"
        options = self._options
        listen = ["--host", options.host, "--port", str(port)]
        common = [role, *TEXT_LOGS, "--model", options.model, *listen, "--node-id", name]
        by_role = options.prefill_arguments if role == "prefill" else options.decode_arguments
        return self._spawn(name, [*common, *options.node_arguments, *by_role, *arguments])

    def _spawn(self, name: str, arguments: Sequence[str]) -> Child:
        return self._start_child(name, [*arguments, *_tls_arguments(self._options.tls)])

    def _start_child(self, name: str, arguments: Sequence[str]) -> Child:
        if self._is_killed:
            raise ClusterFailed("stopped before all processes had started")
        child = Child(name, arguments, self._options, self._settled.put)
        self._lifetime.callback(child.stop)
        self._spawned.append(child)
        return child


def with_port(arguments: Sequence[str], option: str, address: str) -> tuple[str, ...]:
    """Return the arguments with the option, if it is there, set to the port of the address."""
    if option not in arguments:
        return tuple(arguments)
    index = arguments.index(option) + 1
    return (*arguments[:index], address.rpartition(":")[2], *arguments[index + 1 :])


def _command(options: ClusterOptions, role: str) -> list[str]:
    if options.node_program and role != "router":
        return list(options.node_program)
    return [sys.executable, "-m", "baton", *options.program_arguments, "serve"]


def _tls_arguments(tls: TlsConfig) -> list[str]:
    values = {
        "--tls-cert": tls.cert,
        "--tls-key": tls.key,
        "--tls-ca": tls.ca,
        "--tls-client-ca": tls.client_ca,
        "--tls-server-name": tls.server_name or None,
    }
    return [f"{flag}={value}" for flag, value in values.items() if value is not None]


def await_serving(address: str, timeout_s: float, tls: TlsConfig = PLAIN) -> None:
    """Wait until a listening server reports that it is serving. Raises ClusterFailed."""
    with open_blocking_channel(address, tls) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        try:
            for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ClusterFailed(f"{address} was not ready within {timeout_s:.0f} s") from error
            reason = tls_trouble(address, tls) or remote_error(error).message
            raise ClusterFailed(f"the health check of {address} failed: {reason}") from error
        finally:
            watch.cancel()
