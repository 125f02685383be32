"""A local cluster: router, prefill and decode nodes as child processes of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.errors import ServiceError
from serving.server import parse_announcement

LINES_KEPT = 40


class ClusterFailed(ServiceError):
    """A process of the cluster did not start, or ended before its time."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    model: str
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    port: int = 0  # of the router; 0 takes any that is free
    program_arguments: tuple[str, ...] = ()  # of `baton` itself, in front of the command
    node_arguments: tuple[str, ...] = ()  # given to each node as they are
    router_arguments: tuple[str, ...] = ()
    start_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    show_logs: bool = False  # else the last lines are kept, for when a process fails
    environment: dict[str, str] = field(default_factory=dict)


class Child:
    """One process of the cluster, and what it said."""

    def __init__(self, name: str, arguments: Sequence[str], options: ClusterOptions) -> None:
        self.name = name
        self.address = ""
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._show_logs = options.show_logs
        self._announced = threading.Event()
        self._is_told = False
        self._drain_timeout_s = options.drain_timeout_s
        self.process = subprocess.Popen(
            [*_command(options), *arguments, "--parent-pid", str(os.getpid())],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **options.environment},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which drains in order
        )
        self._reader = threading.Thread(target=self._read, name=f"log of {name}")
        self._reader.start()

    def await_address(self, timeout_s: float) -> str:
        """Where it listens, once it does. Raises ClusterFailed."""
        if not self._announced.wait(timeout_s):
            raise ClusterFailed(f"{self.name} did not start within {timeout_s:.0f} s\n{self.log}")
        if not self.address:
            code = self.process.wait()
            raise ClusterFailed(f"{self.name} ended with code {code} at start\n{self.log}")
        return self.address

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
        self._reader.join()
        return code

    def _read(self) -> None:
        """Runs until the process closes its output, which it does at its end at the latest."""
        stream = self.process.stdout
        if stream is None:
            return
        with stream:
            for line in stream:
                self._take(line)
        self._announced.set()

    def _take(self, line: str) -> None:
        announced = parse_announcement(line)
        if announced is not None:
            _, self.address = announced
            self._announced.set()
            return
        self._lines.append(line)
        if self._show_logs:
            print(f"[{self.name}] {line}", end="", file=sys.stderr)


class LocalCluster:
    """Up from `with` to the end of the block; then drained, router first."""

    def __init__(self, options: ClusterOptions) -> None:
        self._options = options
        self._lifetime = ExitStack()
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

    def _start(self) -> None:
        options = self._options
        self.prefills = [self._node("prefill", n) for n in range(options.num_prefill)]
        self.decodes = [self._node("decode", n) for n in range(options.num_decode)]
        self._lifetime.callback(self._ask_nodes_to_stop)
        prefills = [child.await_address(options.start_timeout_s) for child in self.prefills]
        decodes = [child.await_address(options.start_timeout_s) for child in self.decodes]
        self.router = self._router(prefills, decodes)
        await_serving(self.router.await_address(options.start_timeout_s), options.start_timeout_s)

    def _ask_nodes_to_stop(self) -> None:
        """All at once, when the router has ended; each is then waited for."""
        for node in (*self.prefills, *self.decodes):
            node.ask_to_stop()

    def _router(self, prefills: list[str], decodes: list[str]) -> Child:
        options = self._options
        where = ["--host", options.host, "--port", str(options.port)]
        nodes = ["--prefill-nodes", ",".join(prefills), "--decode-nodes", ",".join(decodes)]
        fixed = ["router", "--model", options.model, *where, *nodes]
        return self._spawn("router", [*fixed, *options.router_arguments])

    def _node(self, role: str, number: int) -> Child:
        name = f"{role}-{number}"
        options = self._options
        where = ["--host", options.host, "--port", "0"]
        fixed = [role, "--model", options.model, *where, "--node-id", name]
        return self._spawn(name, [*fixed, *options.node_arguments])

    def _spawn(self, name: str, arguments: Sequence[str]) -> Child:
        child = Child(name, arguments, self._options)
        self._lifetime.callback(child.stop)
        return child


def _command(options: ClusterOptions) -> list[str]:
    return [sys.executable, "-m", "baton", *options.program_arguments, "serve"]


def await_serving(address: str, timeout_s: float) -> None:
    """Returns when the server says that it can serve. Raises ClusterFailed."""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(
            health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
        )
        try:
            for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            raise ClusterFailed(f"{address} was not ready within {timeout_s:.0f} s") from error
        finally:
            watch.cancel()
