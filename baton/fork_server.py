"""Client of the server that forks the processes of a cluster, which then share their imports.

Imports take two thirds of the CPU time in which a node starts. Forks are children of this process:
they are signalled and awaited like others.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from baton.core.errors import NamedError

PROGRAM = "from baton.cli.forking import main; main()"
TITLE_BYTES = 4096  # room in the command line, which forks overwrite with their own
PR_SET_CHILD_SUBREAPER = 36
MAX_REPLY_BYTES = 64
# Whether a process adopts orphans is one setting for all of its threads.
_ADOPTING = threading.Lock()


class ClusterFailed(NamedError):
    """A process of the cluster did not start, or ended too early."""


class ChildProcess:
    """Child process with the methods of `subprocess.Popen` that its users need. Thread-safe."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        # Without waiting for the lock: a signal handler may have interrupted its owner.
        if self.returncode is None and self._reaping.acquire(blocking=False):
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            finally:
                self._reaping.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        while (code := self.poll()) is None:
            with suppress(ProcessLookupError), _pidfd(self.pid) as ended:
                if not ended.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Opened by the first process at the latest. Thread-safe."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment` adds to the variables of this process."""
        self.environment = {**os.environ, **(environment or {})}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def open(self) -> None:
        """Start the server, which then imports what all processes need."""
        with self._lock:
            self._connection = self._connection or self._open()

    def start(self, command: Sequence[str]) -> ChildProcess:
        """Fork a process that runs a module with arguments. Both of its outputs are one pipe.

        Waits for the imports of the server. Raises ClusterFailed.
        """
        order = json.dumps([os.getpid(), *command]).encode()
        output, theirs = os.pipe()
        stdout = open(output)  # noqa: SIM115 - closed by its reader
        try:
            with self._lock, adopting_orphans():
                self._connection = self._connection or self._open()
                socket.send_fds(self._connection, [order], [theirs])
                pid = int(self._connection.recv(MAX_REPLY_BYTES))
        except (ConnectionError, ValueError):
            stdout.close()
            raise ClusterFailed("the server that forks processes has ended") from None
        finally:
            os.close(theirs)
        return ChildProcess(pid, stdout)

    def kill(self) -> None:
        """End the server at once. Safe in a signal handler."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the server. Its forks continue."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.wait()

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), " " * TITLE_BYTES]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return ours


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process the parent of grandchildren whose parent ends within the block."""
    prctl = ctypes.CDLL(None).prctl
    with _ADOPTING:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)


@contextmanager
def _pidfd(pid: int) -> Iterator[select.poll]:
    """Yield a poll of the end of a process."""
    fd = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        yield ended
    finally:
        os.close(fd)
