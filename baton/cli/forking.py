"""Process that forks the processes of a cluster.

It has one thread and uses neither gRPC nor a GPU, since forks have no threads but their own and no
connection to a driver. It imports what all processes need, forks the first one, the router, and
then imports what nodes need.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from baton.cli import make_app
from baton.cli.program import command_of, prepare
from baton.imports import quick_imports

OF_NODES = ("baton.node.run", "baton.engine.runner.load")
MAX_ORDER_BYTES = 1 << 17
REPARENT_POLL_S = 0.0005
# Places of the command line's first and last address in /proc/self/stat, after the name.
ARG_START, ARG_END = 45, 46


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Module and arguments that a fork runs, and the pipe of its output."""

    command: list[str]
    output: int


def main() -> None:
    """Serve the connection that the command line names; in a fork, run its command."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    set_title(["baton", "fork server"])
    prepare()
    parse_command_lines()
    order = _serve(connection)
    if order is not None:
        _run(order)


def _serve(connection: socket.socket) -> StartOrder | None:
    """Fork for each order. Return the order in its fork, and None at the end of the server."""
    while True:
        order, fds, _, _ = socket.recv_fds(connection, MAX_ORDER_BYTES, 1)
        if not order:
            return None  # the process of the cluster has ended, or the cluster
        parent_pid, *command = json.loads(order)
        pid = fork_child_of(parent_pid)
        if pid == 0:
            connection.close()
            return StartOrder(command, fds[0])
        os.close(fds[0])
        connection.send(str(pid).encode())
        _import_for_nodes()


def parse_command_lines() -> None:
    """Build the commands of the roles with their options, which takes a process 0.1 s."""
    with quick_imports():
        app = make_app(("serve",))
    for command in command_of(app).commands["serve"].commands.values():
        command.make_context(command.name, [], resilient_parsing=True)


def _import_for_nodes() -> None:
    with quick_imports(), suppress(ImportError):  # it fails again in the node, which reports it
        for module in OF_NODES:
            import_module(module)


def _run(order: StartOrder) -> None:
    """Run a module in a session of its own: Ctrl-C reaches only the parent, which drains."""
    os.setsid()
    for standard_fd in (1, 2):
        os.dup2(order.output, standard_fd)
    os.close(order.output)
    set_title([sys.executable, "-m", *order.command])
    module, *sys.argv[1:] = order.command
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_child_of(parent_pid: int) -> int:
    """Fork a child of our parent, which adopts orphans. Return its pid, or 0 in the child."""
    read_fd, write_fd = os.pipe()
    middle_pid = os.fork()
    if middle_pid == 0:
        middle_pid = os.getpid()
        pid = os.fork()
        if pid:
            os.write(write_fd, str(pid).encode())
            os._exit(0)
        os.close(read_fd)
        os.close(write_fd)
        while os.getppid() == middle_pid:
            time.sleep(REPARENT_POLL_S)
        if os.getppid() != parent_pid:
            os._exit(1)  # our parent has ended
        return 0
    os.waitpid(middle_pid, 0)  # after its end, our parent is the parent of the child
    pid = int(os.read(read_fd, 64))
    os.close(read_fd)
    os.close(write_fd)
    return pid


def set_title(command: Sequence[str]) -> None:
    """Show a command as that of this process, as far as its own command line has room."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[ARG_START]), int(fields[ARG_END])
    room = max(0, end - start - 1)
    ctypes.memmove(start, b"\0".join(map(os.fsencode, command))[:room].ljust(room, b"\0"), room)
