"""Processes of the ranks that follow the first one: start, orders, messages, logs and end."""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from baton.core.errors import InvalidConfig
from baton.engine.errors import ProcessLost
from baton.engine.runner.batch.encodings import MediaRows
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.model.pass_layout import Ints, PassLayout
from baton.engine.runner.passes.forward_passes import PassStep
from baton.engine.runner.ranks.divided_adapters import SentSelection
from baton.engine.runner.state.state_tables import StateLayout

log = logging.getLogger(__name__)

PROGRAM = "baton.engine.runner.ranks.following"
LOG_EVERY_S = 10.0  # what the start waits for
WATCH_EVERY_S = 2.0
MAX_MESSAGE_BYTES = 1 << 20
OnEnd = Callable[[int], None]  # takes the rank
WhenLost = Callable[[Exception], None]


class Setup(NamedTuple):
    """First message to a rank. The descriptor of the links' memory comes with it."""

    config: RunnerConfig
    rank: int
    log_level: int
    cpus: frozenset[int] | None  # to run on; None: all


class Begin(NamedTuple):
    """Message to a rank that has loaded its weights. The KV cache's descriptor comes along."""

    num_blocks: int


class LoadAdapter(NamedTuple):
    """Message to a rank that waits for passes. The descriptor of its parts' memory comes along."""

    number: int


class DropAdapter(NamedTuple):
    """Message to a rank, after the last pass with this adapter."""

    number: int


class Ready(NamedTuple):
    """Message of a rank that has carried out a message, or why it cannot."""

    fault: Exception | None = None


class RankWatch(NamedTuple):
    """Signs of life of ranks that have nothing to compute."""

    beats: Callable[[int], int | None]  # of a rank: they grow; None: it computes, or loads
    patience_s: float


UNWATCHED = RankWatch(lambda _: None, 0.0)


class _RankAnswer(NamedTuple):
    rank: int
    fault: Exception | None


class RankProcesses:
    """Other ranks of a node. They end with this process, however it ends."""

    def __init__(
        self,
        config: RunnerConfig,
        links_fd: int,
        on_end: OnEnd,
        program: str = PROGRAM,
        cpus: Sequence[frozenset[int] | None] | None = None,
        watch: RankWatch = UNWATCHED,
    ) -> None:
        """`on_end` is called by a thread when a rank ends or hangs. Raises InvalidConfig.

        `cpus` has those of each rank, the first one included; None: all can use all.
        """
        cpus = cpus or [None] * config.tensor_parallel_size
        self._on_end = on_end
        self._owner = os.getpid()
        self._is_closing = False
        self._lock = threading.Lock()  # of the next two
        self._lost: ProcessLost | None = None
        self._when_lost: WhenLost = lambda _: None
        self._answers = SimpleQueue[_RankAnswer]()
        self._ranks: list[_Rank] = []
        self._awaited: set[int] = set()
        try:
            for number in range(1, config.tensor_parallel_size):
                self._ranks.append(_Rank(number, self._answers.put, self._note_end, watch))
                self._ranks[-1].start(program)
            for rank in self._ranks:
                number, level = rank.number, log.getEffectiveLevel()
                rank.send(Setup(config, number, level, cpus[number]), links_fd)
                self._awaited.add(rank.number)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(links_fd)

    def check(self) -> None:
        """Raise the fault of a rank, if one has failed by now. For calls during the start."""
        with suppress(Empty):
            while True:
                self._take(self._answers.get_nowait())

    def wait_until_loaded(self) -> None:
        """Wait for the weights of all ranks. Raises ModelError, InvalidConfig and ProcessLost."""
        self._wait_for("the weights")

    def begin(self, num_blocks: int, kv_fd: int) -> None:
        """Have all ranks wait for passes over a KV cache of this size. Raises ProcessLost."""
        for rank in self._ranks:
            rank.send(Begin(num_blocks), kv_fd)
            self._awaited.add(rank.number)
        self._wait_for("the KV cache")

    def load_adapter(self, number: int, parts_by_rank: Sequence[object]) -> None:
        """Have all ranks load their parts of an adapter. One thread at a time, any.

        Returns once all have them. Raises ModelError, and ProcessLost if a rank has ended.
        """
        for rank, parts in zip(self._ranks, parts_by_rank, strict=True):
            with open(os.memfd_create("baton adapter"), "wb") as memory:
                pickle.dump(parts, memory, pickle.HIGHEST_PROTOCOL)
                memory.flush()
                rank.send(LoadAdapter(number), memory.fileno())
        with self._lock:
            lost = self._lost
        # All answer, or end: none of their answers may be left for the next adapter.
        faults = [lost] if lost else [self._answers.get().fault for _ in self._ranks]
        for fault in faults:
            if fault is not None:
                raise fault

    def drop_adapter(self, number: int) -> None:
        for rank in self._ranks:
            rank.send(DropAdapter(number))

    def when_lost(self, call: WhenLost) -> None:
        """Have a thread call this when a rank ends by itself, or do so now if one has ended."""
        with self._lock:
            self._when_lost, lost = call, self._lost
        if lost is not None:
            call(lost)

    def close(self) -> None:
        """End all ranks, and wait for that. Does nothing in a fork of the first rank."""
        if os.getpid() != self._owner:
            return
        self._is_closing = True
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()

    def _wait_for(self, what: str) -> None:
        while self._awaited:
            try:
                self._take(self._answers.get(timeout=LOG_EVERY_S))
            except Empty:
                log.info("waiting for %s of %s", what, _names(self._awaited))

    def _take(self, answer: _RankAnswer) -> None:
        if answer.fault is not None:
            raise answer.fault
        self._awaited.remove(answer.rank)

    def _note_end(self, rank: int, how: str) -> ProcessLost:
        self._on_end(rank)
        lost = ProcessLost(f"rank {rank} of this node {how}")
        with self._lock:
            is_first = self._lost is None and not self._is_closing
            if is_first:  # the others end because of it
                self._lost = lost
            when_lost = self._when_lost
        if is_first:
            log.error("%s: the node cannot go on", lost)
            when_lost(lost)
        return lost


class _Rank:
    """Process of a rank, with a thread that starts it and reads what it sends until it ends."""

    def __init__(
        self,
        number: int,
        on_answer: Callable[[_RankAnswer], None],
        note_end: Callable[[int, str], ProcessLost],
        watch: RankWatch,
    ) -> None:
        self.number = number
        self._watch = watch
        self._on_answer = on_answer
        self._note_end = note_end
        self._connection: socket.socket
        self._thread = threading.Thread(target=self._run, name=f"rank {number}", daemon=True)
        self._started: Future[subprocess.Popen[bytes]] = Future()
        self._program = ""

    def start(self, program: str) -> None:
        """Start the process. Raises InvalidConfig.

        The thread does, since the kernel ends the process with the thread that has started it: so
        it ends with this process, whatever this thread does.
        """
        self._program = program
        self._thread.start()
        self._started.result()

    def send(self, message: NamedTuple, *fds: int) -> None:
        with suppress(OSError):  # of a rank that has ended, which is reported
            socket.send_fds(self._connection, [pickle.dumps(message)], fds)

    def kill(self) -> None:
        """End the process, which keeps nothing, even if it is stopped."""
        with suppress(InvalidConfig):  # it has not started
            if self._thread.ident is not None:
                self._started.result().kill()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._connection, process = _start_process(self._program)
        except OSError as error:
            fault = f"--tensor-parallel-size: rank {self.number} cannot be started: {error}"
            self._started.set_exception(InvalidConfig(fault))
            return
        self._started.set_result(process)
        with self._connection:
            hangs = not self._read()
            if hangs:
                how = f"hangs: no sign of life for {self._watch.patience_s} s"
            else:
                how = _how(process.wait())
            lost = self._note_end(self.number, how)
            if hangs:
                process.kill()
                process.wait()
        self._on_answer(_RankAnswer(self.number, lost))

    def _read(self) -> bool:
        """Read what the process sends. Returns True at its end, and False once it hangs."""
        written, silence = select.poll(), _Silence(self.number, self._watch)
        written.register(self._connection, select.POLLIN)
        with suppress(ConnectionError):
            while True:
                if not written.poll(1000 * WATCH_EVERY_S):
                    if silence.hangs():
                        return False
                elif not self._read_message():
                    return True
        return True

    def _read_message(self) -> bool:
        """Read a message. Returns False if there is none any more."""
        written = self._connection.recv(MAX_MESSAGE_BYTES)
        if not written:
            return False
        message = pickle.loads(written)
        if isinstance(message, Ready):
            self._on_answer(_RankAnswer(self.number, message.fault))
        else:
            _log_record(message)
        return True


class _Silence:
    """Time for which an idle rank has shown no sign of life.

    It is counted in looks, not by a clock: those of a process that was stopped itself are missing.
    """

    def __init__(self, rank: int, watch: RankWatch) -> None:
        self._rank = rank
        self._watch = watch
        self._last: int | None = None
        self._num_looks = 0

    def hangs(self) -> bool:
        """Look again, `WATCH_EVERY_S` later. Returns whether the rank hangs."""
        beats = self._watch.beats(self._rank)
        is_silent = beats is not None and beats == self._last
        self._num_looks = self._num_looks + 1 if is_silent else 0
        self._last = beats
        return self._num_looks * WATCH_EVERY_S > self._watch.patience_s


def _start_process(program: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a program in a session of its own: Ctrl-C in a terminal reaches the first rank alone.

    Returns the connection to it, too.
    """
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        fd = other.fileno()
        command = [sys.executable, "-m", program, str(fd), str(os.getpid())]
        try:
            return own, subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True
            )
        except BaseException:
            own.close()
            raise


def _log_record(record: logging.LogRecord) -> None:
    """Log what a rank has logged, in the format of this process."""
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))


def _how(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was ended by SIGKILL, as by the kernel when memory runs out"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class SentStep:
    """Implements `PassStep` by values that can be sent."""

    token_ids: Ints
    layout: PassLayout
    sampled: Sequence[int]
    seen_lens: Ints
    max_len: int
    states: StateLayout | None

    @classmethod
    def of(cls, step: PassStep) -> SentStep:
        return cls(
            step.token_ids, step.layout, step.sampled, step.seen_lens, step.max_len, step.states
        )


@dataclass(frozen=True, slots=True)
class ComputePass:
    """Message of the first rank to the others: the pass to compute with it."""

    step: SentStep
    media: MediaRows | None
    grid: Ints | None
    needs_all: bool
    adapters: SentSelection | None = None


@dataclass(frozen=True, slots=True)
class MultiplyHead:
    """Multiply rows, which follow, by the own part of the LM head."""

    num_rows: int
