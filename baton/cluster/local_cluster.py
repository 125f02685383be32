"""Local cluster: a router, its nodes, and the order in which they start and drain."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster.child import Child, ChildOptions
from baton.core.options import options_of
from baton.fork_server import ClusterFailed, ForkServer
from baton.rpc.channel import open_blocking_channel
from baton.rpc.security.tls import PLAIN, TlsConfig, connection_trouble
from baton.rpc.status import remote_error

RESTARTED_PORTS = {("--port", "0"), ("--http-port", "0")}  # that a restart keeps
TEXT_LOGS = ("--log-format", "text")  # shown, or part of the error when a process fails
NAME = "baton-nodes"  # shown in /proc


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """Model that a cluster serves besides its first one, to embed or score texts."""

    folder: str
    name: str = ""  # that clients use; empty: the last name of the folder


@dataclass(frozen=True, slots=True)
class ClusterOptions(ChildOptions):
    """Model, size and addresses of a cluster, and the arguments of its processes."""

    model: str
    num_prefill: int = 1
    num_decode: int = 1
    # No prefill nodes: num_prefill + num_decode decode nodes, which also compute the prompts.
    is_colocated: bool = False
    num_encode: int = 0
    host: str = "127.0.0.1"
    port: int = 0  # of the router; 0 takes any free port
    node_arguments: tuple[str, ...] = ()  # passed to every node
    prefill_arguments: tuple[str, ...] = ()  # passed to every prefill node, after node_arguments
    decode_arguments: tuple[str, ...] = ()
    encode_arguments: tuple[str, ...] = ()
    # Each has a node; a model that is repeated has several. They are prefill nodes, or decode nodes
    # where there are no prefill nodes.
    embedders: tuple[FurtherModel, ...] = ()
    embedder_arguments: tuple[str, ...] = ()  # instead of node_arguments; no settings file is read
    router_arguments: tuple[str, ...] = ()
    tls: TlsConfig = PLAIN
    start_timeout_s: float = 120.0
    model_name: str = ""  # of `model`, as its nodes serve it; empty: that of the folder
    # Where the router finds a node.
    router_target_of: Callable[[Child], str] = lambda child: child.address

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode + self.num_encode + len(self.embedders)


class LocalCluster:
    """Cluster that starts at `with` and drains at the end of the block, router first."""

    def __init__(self, options: ClusterOptions, forks: ForkServer | None = None) -> None:
        self._options = options
        self._lifetime = ExitStack()
        self._router_lifetime = ExitStack()  # ends first
        self._forks = forks or ForkServer(options.environment)
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._spawned: list[Child] = []
        self._lists: dict[str, NodeList] = {}  # of each role, for the router
        self._successors: dict[Child, Child] = {}  # of processes that were restarted
        self._is_killed = False
        self._settled: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self.router: Child
        self.prefills: list[Child] = []
        self.decodes: list[Child] = []
        self.encoders: list[Child] = []  # of pictures
        self.embedders: list[Child] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        with self._lifetime:
            self._router_lifetime.close()

    @property
    def address(self) -> str:
        """Address of the router, for clients."""
        return self.router.address

    @property
    def nodes(self) -> list[Child]:
        return [*self.prefills, *self.decodes, *self.encoders, *self.embedders]

    @property
    def children(self) -> list[Child]:
        return [self.router, *self.nodes]

    def kill(self) -> None:
        """Kill all processes without draining. Safe in a signal handler."""
        self._is_killed = True
        self._forks.kill()
        for child in self._spawned:
            child.process.kill()

    def start_node(
        self, role: str, *, name: str = "", port: int = 0, arguments: tuple[str, ...] = ()
    ) -> Child:
        """Start a node without listing it for the router. Raises ClusterFailed."""
        child = self._spawn_node(role, name, port, arguments)
        child.await_address(self._options.start_timeout_s)
        return child

    def restart(self, ended: Child) -> Child:
        """Start a new process at the addresses of one that has ended. Raises ClusterFailed."""
        child = self.begin_restart(ended, self._settled.put)
        child.await_address(self._options.start_timeout_s)
        return child

    def begin_restart(self, ended: Child, on_settled: Callable[[Child], None]) -> Child:
        """Start a new process as `restart` does, but do not wait until it listens.

        `on_settled` is called on another thread when it listens, or ended without listening.
        """
        child = Child(ended.name, ended.arguments, ended.options, self._forks, on_settled)
        self._spawned.append(child)
        self._successors[ended] = child  # takes its turn when the cluster ends
        if self._is_killed:
            child.process.kill()
        if ended is self.router:
            self.router = child
        else:
            siblings = (self.prefills, self.decodes, self.encoders, self.embedders)
            [own] = (nodes for nodes in siblings if ended in nodes)
            own[own.index(ended)] = child
        return child

    def list_nodes(self, role: str) -> None:
        """Write the list of the nodes of a role that the router reads."""
        addresses = (self._options.router_target_of(node) for node in self._nodes(role))
        self._lists[role].write(addresses)

    def _start(self) -> None:
        options = self._options
        num_prefill, num_decode = options.num_prefill, options.num_decode
        if options.is_colocated:
            num_prefill, num_decode = 0, num_prefill + num_decode
        self._lifetime.callback(self._forks.close)
        # The router loads while the nodes do, and finds them in lists as soon as all listen. It is
        # first, so that it does not wait for what the nodes import.
        num_nodes = {"prefill": num_prefill, "decode": num_decode, "encode": options.num_encode}
        num_nodes["prefill" if num_prefill else "decode"] += len(options.embedders)
        for role, number in num_nodes.items():
            if number:
                self._lists[role] = self._lifetime.enter_context(NodeList())
        self.router = self._spawn_router()
        self.prefills = [self._spawn_node("prefill") for _ in range(num_prefill)]
        self.decodes = [self._spawn_node("decode") for _ in range(num_decode)]
        self.encoders = [self._spawn_node("encode") for _ in range(options.num_encode)]
        self.embedders = [
            self._spawn_embedder(f"embed-{index}", model)
            for index, model in enumerate(options.embedders)
        ]
        self._lifetime.callback(self._ask_nodes_to_stop)
        self._await_all(self.children)
        for role in self._lists:
            self.list_nodes(role)
        await_serving(self.address, options.start_timeout_s, options.tls)

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
        nodes = {"prefill": self.prefills, "decode": self.decodes, "encode": self.encoders}[role]
        return [*nodes, *self.embedders] if role == self._role_of_embedders else nodes

    @property
    def _role_of_embedders(self) -> str:
        return "prefill" if self.prefills else "decode"

    def _ask_nodes_to_stop(self) -> None:
        """Send SIGTERM to all nodes at once, after the router has ended; `stop` then waits."""
        for node in self.nodes:
            node.request_stop()

    def _spawn_router(self) -> Child:
        options = self._options
        listen = ["--host", options.host, "--port", str(options.port)]
        nodes = [f"--{role}-nodes=file://{each.path}" for role, each in self._lists.items()]
        common = ["router", *TEXT_LOGS, *self._models(), *listen, *nodes]
        return self._spawn("router", [*common, *options.router_arguments])

    def _models(self) -> Iterator[str]:
        """Yield the models for the router. The name of a single one may remain open."""
        options = self._options
        first = FurtherModel(options.model, options.model_name if options.embedders else "")
        for model in dict.fromkeys((first, *options.embedders)):  # one can have several nodes
            yield "--model"
            yield f"{model.name}={model.folder}" if model.name else model.folder

    def _spawn_node(
        self, role: str, name: str = "", port: int = 0, arguments: tuple[str, ...] = ()
    ) -> Child:
        name = name or f"{role}-{next(self._numbers[role])}"
        options = self._options
        listen = ["--host", options.host, "--port", str(port)]
        common = [role, *TEXT_LOGS, "--model", options.model, *listen, "--node-id", name]
        own = {
            "prefill": options.prefill_arguments,
            "decode": options.decode_arguments,
            "encode": options.encode_arguments,
        }[role]
        return self._spawn(name, [*common, *options.node_arguments, *own, *arguments])

    def _spawn_embedder(self, node_id: str, model: FurtherModel) -> Child:
        options, role = self._options, self._role_of_embedders
        listen = ["--host", options.host, "--port", "0", "--node-id", node_id]
        name = ["--served-model-name", model.name] if model.name else []
        common = [role, *TEXT_LOGS, "--model", model.folder, *name, *listen]
        no_file = replace(options, program_arguments=())
        return self._spawn(node_id, [*common, *options.embedder_arguments], no_file)

    def _spawn(
        self, name: str, arguments: Sequence[str], options: ChildOptions | None = None
    ) -> Child:
        if self._is_killed:
            raise ClusterFailed("stopped before all processes had started")
        arguments = [*self._with_reserved_ports(arguments), *_tls_arguments(self._options.tls)]
        options = options or self._options
        child = Child(name, arguments, options, self._forks, self._settled.put)
        lifetime = self._router_lifetime if name == "router" else self._lifetime
        lifetime.callback(self._stop, child)
        self._spawned.append(child)
        return child

    def _with_reserved_ports(self, arguments: Sequence[str]) -> Sequence[str]:
        """Replace ports 0 by ports that no other process gets while this process can restart.

        A bound socket that does not listen keeps a port from those that the kernel chooses.
        """
        arguments = list(arguments)
        for index, pair in enumerate(itertools.pairwise(arguments), start=1):
            if pair in RESTARTED_PORTS:
                with suppress(OSError):  # of the host: the process reports it
                    reserved = self._lifetime.enter_context(reserved_port(self._options.host))
                    arguments[index] = str(reserved.getsockname()[1])
        return arguments

    def _stop(self, child: Child) -> None:
        """Stop a process, or the one that was started in its place."""
        child.stop()
        while child in self._successors:
            child = self._successors[child]
            child.stop()


def reserved_port(host: str) -> socket.socket:
    """Return a socket that is bound to a free port, which a server can bind, too."""
    [(family, *_, address), *_] = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    reserved = socket.socket(family)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers set it as well
    reserved.bind(address)
    return reserved


def _tls_arguments(tls: TlsConfig) -> list[str]:
    values = ((option, getattr(tls, option.field)) for option in options_of(TlsConfig).values())
    return [f"{option.flag}={value}" for option, value in values if value != option.default]


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
            details = remote_error(error).message
            reason = connection_trouble(address, tls, details) or details
            raise ClusterFailed(f"the health check of {address} failed: {reason}") from error
        finally:
            watch.cancel()


class NodeList:
    """Addresses of nodes that other processes of the same user read as a file."""

    def __init__(self) -> None:
        self._file = os.memfd_create(NAME)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def write(self, addresses: Iterable[str]) -> None:
        """Replace the addresses. A reader gets the old ones or the new ones."""
        new = os.memfd_create(NAME)
        try:
            os.write(new, "\n".join(addresses).encode("ascii"))
            os.dup2(new, self._file, inheritable=False)
        finally:
            os.close(new)
