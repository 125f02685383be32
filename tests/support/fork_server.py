"""Fork servers for `python -m baton`, which save each process the import of torch.

A server imports the packages of all roles once and forks. Each fork becomes a child of the test
process and runs the command line, like a process started by Popen: it can be signalled, waited
for and killed in the same way. Processes with an environment of their own have their own
server, unless this differs only in variables that nothing reads while it is imported. Before a
command that starts a cluster, its process forks a server for it.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

from baton.cli import MODULES, make_app
from baton.cli.forking import fork_child_of, parse_command_lines
from baton.cli.program import command_of, prepare
from baton.fork_server import ChildProcess, ForkServer, adopting_orphans

NODES = "tests.support.preloaded_nodes"
PRELOADED = (
    NODES,
    "baton.router.__main__",
    "baton.router.doors.http_app",
    "baton.router.http.server",
    "baton.telemetry.metrics.otlp",
    "baton.telemetry.tracing.otlp",
    "typer._adapters",
    "baton.checkpoint.tokenizer_files",
    "numpy.random",
    "encodings.idna",
)
PYTHON = (sys.executable, "-m")
# Programs that can be forked, with the module of `main`.
PROGRAMS = {
    "baton": "baton.__main__",
    "benchmarks": "benchmarks.__main__",
    "benchmarks.chaos.node": "benchmarks.chaos.node",
}
PACKAGE_PATH = "PYTHONPATH"
# Variables that nothing reads while the packages are imported.
READ_LATE = (
    *(PACKAGE_PATH, "BATON_", "_BATON_", "COMP_", "COLUMNS", "NO_COLOR", "TERM"),
    *("BROWSER", "TMPDIR"),
)
WORKERS = "tests.support.forked_workers"
# Commands whose processes fork further ones.
CLUSTER_COMMANDS = {("baton", "up"), ("baton", "demo"), ("benchmarks", "tiers"), (WORKERS,)}
MADV_COLLAPSE, HUGE_PAGE = 25, 1 << 21
MAX_REQUEST_BYTES = 1 << 17
NUM_STREAMS, MAX_FDS = 3, 5


class ServerProcess(Protocol):
    """Server of a test process, or of a process that a server forked."""

    def wait(self) -> int: ...


Server = tuple[ServerProcess, socket.socket]


class ForkServers:
    """Starts each server process on first use. Thread-safe."""

    def __init__(self, module: str = "tests.support.fork_server", *arguments: str) -> None:
        """`module` is the main module of the servers. `arguments` follow the descriptor."""
        self._module = module
        self._arguments = arguments
        self._lock = threading.Lock()
        # By the variables that differ from those of the test process.
        self._servers: dict[frozenset[tuple[str, str]], Server] = {}

    def add(self, process: ServerProcess, connection: socket.socket) -> None:
        """Use a server that has the environment of this process."""
        self._servers[frozenset()] = process, connection

    def close(self) -> None:
        """End the servers. The processes that they forked continue."""
        for process, connection in self._servers.values():
            connection.close()
            process.wait()
        self._servers.clear()

    def fork(self, command: Sequence[str], environment: dict[str, str], fds: list[int]) -> int:
        """Fork a process with these standard streams. Return its pid.

        Further descriptors become its last arguments, with the numbers that they have there.

        Raises ChildProcessError if the server has ended.
        """
        _, _, program, *arguments = command
        order = [os.getpid(), os.getcwd(), program, arguments, environment]
        changed = dict(environment.items() - os.environ.items())
        own = frozenset((name, changed[name]) for name in changed if not _is_read_late(name))
        with self._lock:
            if own not in self._servers:
                self._servers[own] = self._start_server({**os.environ, **dict(own)})
            _, connection = self._servers[own]
            with adopting_orphans():
                socket.send_fds(connection, [json.dumps(order).encode()], fds)
                reply = connection.recv(64)
        if not reply:
            raise ChildProcessError("the fork server has ended")
        return int(reply)

    def _start_server(self, environment: dict[str, str]) -> Server:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", self._module, str(theirs.fileno()), *self._arguments]
            process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[2],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return process, ours


class ForkedProcess(subprocess.Popen[str]):
    """Popen whose process is forked from a server. `command` must be one that can be forked."""

    def __init__(self, servers: ForkServers, command: Sequence[str], **settings: Any) -> None:
        self._servers = servers
        super().__init__(command, text=True, **settings)

    def _execute_child(self, *settings: Any) -> None:
        command, more_fds, environment = settings[0], settings[4], settings[6]
        pipes = settings[10:16]
        stdin, _, _, stdout, _, stderr = pipes
        fds = [given if given != -1 else own for own, given in enumerate((stdin, stdout, stderr))]
        fds += more_fds
        try:
            self.pid = self._servers.fork(command, environment or dict(os.environ), fds)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


SERVERS = ForkServers()


def use_servers(set_attribute: Callable[[object, str, object], object]) -> None:
    """Fork the processes of clusters from `SERVERS`: one import of torch for all of them."""
    start = ForkServer.start

    def start_here(own: ForkServer, command: Sequence[str]) -> ChildProcess:
        if command[0] not in PROGRAMS:
            return start(own, command)
        output, theirs = os.pipe()
        with open(os.devnull) as stdin:
            fds = [stdin.fileno(), theirs, theirs]
            pid = SERVERS.fork([*PYTHON, *command], own.environment, fds)
        os.close(theirs)
        return ChildProcess(pid, open(output))

    set_attribute(ForkServer, "start", start_here)
    set_attribute(ForkServer, "open", lambda _own: None)


def can_fork(command: Sequence[str]) -> bool:
    """Return whether this is `python -m` with a program that the servers can fork."""
    return tuple(command[:2]) == PYTHON and command[2] in PROGRAMS


def _is_read_late(variable: str) -> bool:
    return variable.startswith(READ_LATE)


# --- Server process -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """Program that a fork runs, with its arguments and its standard streams."""

    program: str
    arguments: list[str]
    fds: list[int]

    @property
    def starts_cluster(self) -> bool:
        return (self.program, *self.arguments[:1]) in CLUSTER_COMMANDS


@dataclass(frozen=True, slots=True)
class NestedServer:
    """Server that a forked process has forked for its own children."""

    pid: int

    def wait(self) -> int:
        return os.waitpid(self.pid, 0)[1]


class QuickExit:
    """Ends the process after its threads and its functions of atexit.

    The rest of an exit would copy every page that the process shares with its server.
    """

    def __init__(self) -> None:
        self.code: object = 1  # of an exception
        atexit.register(self._end)

    def run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except SystemExit as ended:
            self.code = ended.code
            raise
        self.code = 0

    def _end(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if self.code is None or isinstance(self.code, int):
            os._exit(self.code or 0)


def serve(connection: socket.socket) -> ForkOrder | None:
    """Fork for each request. Return the order of a fork in the fork, else None."""
    while True:
        request, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_FDS)
        if not request:
            return None
        parent_pid, folder, program, arguments, environment = json.loads(request)
        pid = fork_child_of(parent_pid)
        if pid == 0:
            connection.close()
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            tempfile.tempdir = None  # read from TMPDIR again
            sys.path[1:1] = filter(None, environment.get(PACKAGE_PATH, "").split(os.pathsep))
            return ForkOrder(program, arguments, fds)
        _close_all(fds)
        connection.send(str(pid).encode())


def serve_and_run(connection: socket.socket) -> None:
    """Serve; in a fork, run its program."""
    order = serve(connection)
    while order is not None and order.starts_cluster:
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid:
            theirs.close()
            _use_server(NestedServer(pid), connection)
            break
        connection.close()
        _close_all(order.fds)
        order = serve(theirs)
    if order is not None:
        _adopt_streams(order.fds[:NUM_STREAMS])
        sys.argv[1:] = [*order.arguments, *map(str, order.fds[NUM_STREAMS:])]
        import_module(PROGRAMS.get(order.program, order.program)).main()


def _use_server(process: ServerProcess, connection: socket.socket) -> None:
    """Fork the processes of a cluster of this process from a server of its own."""
    SERVERS.add(process, connection)
    atexit.register(SERVERS.close)
    use_servers(setattr)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _adopt_streams(fds: Sequence[int]) -> None:
    """Use these standard streams, in a session of its own. A terminal becomes its terminal."""
    os.setsid()
    for standard_fd, fd in enumerate(fds):
        os.dup2(fd, standard_fd)
    _close_all(fds)
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    if sys.stdout.isatty():
        fcntl.ioctl(sys.stdout, termios.TIOCSCTTY, 0)


def _leave_out_finalizers() -> None:
    """Make the exit of a fork skip the finalizers of imports, which copy thousands of pages.

    They belong to the server. `weakref` has no public way to reach those of others.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _use_huge_pages() -> None:
    """Move this process's memory to huge pages: a fork copies 512 times fewer table entries.

    Kernels before Linux 6.1 refuse it.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if "w" in rights and inode == "0":
            for page in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


def run_server(import_all: Callable[[], object]) -> None:
    """Import what the forks need, and serve the connection that the command line names."""
    quick_exit = QuickExit()
    connection = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # until all is imported: collections would take a quarter of the time
    import_all()
    _leave_out_finalizers()
    gc.freeze()
    gc.enable()
    _use_huge_pages()
    quick_exit.run(lambda: serve_and_run(connection))


def preload() -> None:
    """Import what the programs need."""
    prepare()
    for name in (*PRELOADED, *PROGRAMS.values()):
        import_module(name)
    parse_command_lines()
    for name in MODULES:
        command_of(make_app((name,)))


if __name__ == "__main__":
    run_server(preload)
