"""Processes of the ranks that follow the first one: their start, orders and end."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.errors import InvalidConfig, ModelError
from baton.engine.errors import RunnerLost
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.model.rank_group import Shard

log = logging.getLogger(__name__)

END_PATIENCE_S = 5.0
MAX_MESSAGE_BYTES = 1 << 20
OnEnd = Callable[[int], None]  # takes the rank


class Setup(NamedTuple):
    """First message to a rank. File descriptors of the links come with it."""

    config: RunnerConfig
    rank: int


class Begin(NamedTuple):
    """Message to a rank that has loaded its weights. The KV cache's descriptor comes along."""

    num_blocks: int


class Ready(NamedTuple):
    """Message of a rank that has done what it was told; or why it cannot."""

    fault: str = ""
    is_setting: bool = False  # which is at fault: else it is the model


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    is_loaded: bool = False


def shard_of(config: RunnerConfig, rank: int) -> Shard:
    """Return the part of the weights that a rank computes."""
    return Shard(rank, config.tensor_parallel_size, config.enable_expert_parallel)


class RankProcesses:
    """Other ranks of a node. They end with this process, however it ends."""

    def __init__(self, config: RunnerConfig, links_fd: int, on_end: OnEnd) -> None:
        """`on_end` is called by a thread when a rank ends, and for rank 0 when all are to end."""
        self._on_end = on_end
        self._is_closing = False
        self.when_lost: Callable[[Exception], None] = lambda _: None  # a rank ended by itself
        self._ranks: list[_Rank] = []
        try:
            for rank in range(1, config.tensor_parallel_size):
                self._ranks.append(_start(rank, config, links_fd))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(links_fd)
        for each in self._ranks:
            name = f"rank {each.number}"
            threading.Thread(target=self._watch, args=(each,), name=name, daemon=True).start()

    def wait_until_loaded(self) -> None:
        """Wait for the weights of all ranks. Raises ModelError, InvalidConfig and RunnerLost."""
        for rank in self._ranks:
            if not rank.is_loaded:
                log.info("waiting for the weights of rank %d", rank.number)
                _receive_ready(rank)
                rank.is_loaded = True

    def begin(self, num_blocks: int, kv_fd: int) -> None:
        """Have all ranks wait for passes over a KV cache of this size."""
        for rank in self._ranks:
            _send(rank.connection, Begin(num_blocks), kv_fd)
        for rank in self._ranks:
            _receive_ready(rank)

    def close(self) -> None:
        """End all ranks, and wait for that."""
        self._is_closing = True
        self._on_end(0)
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            try:
                rank.process.wait(END_PATIENCE_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def _watch(self, rank: _Rank) -> None:
        code = rank.process.wait()
        self._on_end(rank.number)
        if not self._is_closing:
            lost = RunnerLost(f"rank {rank.number} of this node {_how(code)}")
            log.error("%s: the node cannot go on", lost)
            self.when_lost(lost)


def _start(rank: int, config: RunnerConfig, links_fd: int) -> _Rank:
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        command = [sys.executable, "-m", "baton.engine.runner.ranks.following", str(other.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(other.fileno(),))
    started = _Rank(rank, process, own)
    _send(own, Setup(config, rank), links_fd)
    return started


def _send(connection: socket.socket, message: NamedTuple, fd: int) -> None:
    with suppress(OSError):  # of a rank that has ended: the answer is missing, too
        socket.send_fds(connection, [pickle.dumps(message)], [fd])


def receive(connection: socket.socket) -> tuple[object, int]:
    """Return a message to a rank, and the descriptor that comes with it. Raises EOFError."""
    written, fds, *_ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
    if not written:
        raise EOFError
    return pickle.loads(written), fds[0]


def _receive_ready(rank: _Rank) -> None:
    try:
        written = rank.connection.recv(MAX_MESSAGE_BYTES)
    except OSError:
        written = b""
    if not written:
        code = rank.process.wait()
        raise RunnerLost(f"rank {rank.number} {_how(code)} before it was ready")
    ready: Ready = pickle.loads(written)
    if ready.fault:
        raise (InvalidConfig if ready.is_setting else ModelError)(ready.fault)


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"
