"""A rank's connection to the first one of its node, which starts it, gives orders and ends it."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue

from baton.core.errors import InvalidConfig, ModelError
from baton.engine.errors import RunnerLost
from baton.engine.runner.ranks.processes import MAX_MESSAGE_BYTES, Begin, Ready, Setup

PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class FirstRank:
    """Connection to the first rank. All methods wait for it; this process ends with it."""

    def __init__(self, fd: int, parent: int) -> None:
        _end_with(parent)
        # Service managers send SIGTERM to all processes of a node, whose first rank drains then.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._connection = socket.socket(fileno=fd)
        self._name = "rank"

    @classmethod
    def of_command_line(cls) -> FirstRank:
        return cls(*map(int, sys.argv[1:]))

    def receive_setup(self) -> tuple[Setup, int]:
        """Return the settings, and the descriptor of the links' memory. Logs go there from now."""
        setup, links_fd = self._receive()
        assert isinstance(setup, Setup)
        self._name = f"rank {setup.rank}"
        if setup.cpus is not None:  # for all threads that start from now on
            os.sched_setaffinity(0, setup.cpus)
        root = logging.getLogger()
        root.addHandler(_RecordSender(self._connection, self._name))
        root.setLevel(setup.log_level)
        return setup, links_fd

    def receive_begin(self) -> tuple[Begin, int]:
        """Return the size of the KV cache, and its descriptor."""
        begin, kv_fd = self._receive()
        assert isinstance(begin, Begin)
        return begin, kv_fd

    @contextmanager
    def carrying_out(self) -> Iterator[None]:
        """Report the end of the block, or its fault. This process is ended after a fault."""
        fault: Exception | None = None
        try:
            yield
        except (ModelError, InvalidConfig) as error:
            kind = InvalidConfig if isinstance(error, InvalidConfig) else ModelError
            fault = kind(f"{self._name}: {error}")
        except Exception as error:
            log.exception("the start failed")
            fault = RunnerLost(f"{self._name} of this node cannot start: {error!r}")
        with suppress(ConnectionError):  # this process is about to end
            self._connection.send(pickle.dumps(Ready(fault)))
        if fault is not None:
            self._receive()

    def _receive(self) -> tuple[object, int]:
        """Return a message, and its descriptor. Ends this process if the connection is closed."""
        written, fds = b"", [-1]
        with suppress(ConnectionError):
            written, fds, *_ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, 1)
        if not written:
            sys.exit()
        return pickle.loads(written), fds[0]


class _RecordSender(QueueHandler):
    """Sends records to the first rank, which logs them in the format of the node."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        super().__init__(SimpleQueue())
        self._connection = connection
        self._prefix = f"{name}: "

    def enqueue(self, record: logging.LogRecord) -> None:
        record.msg = self._prefix + record.msg
        with suppress(ConnectionError):  # this process is about to end
            self._connection.send(pickle.dumps(record))


def _end_with(parent: int) -> None:
    """Have the kernel end this process with the thread that has started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        sys.exit()
