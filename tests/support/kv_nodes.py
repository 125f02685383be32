"""KV workers in child processes with a real transport, which run the commands of a test."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from baton.core.ids import BlockId, HandoffId, Incarnation, NodeId, Peer
from baton.kv_transfer.config import KvWorkerConfig, ReceiverConfig, SenderConfig
from baton.kv_transfer.layout import KvLayout
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.protocol.messages import Fingerprint, Region
from baton.kv_transfer.records import TransferRecord
from baton.kv_transfer.types import KvOrders, KvReports
from baton.kv_transfer.worker import KvCounters, KvTransferWorker
from tests.support.forked_forkserver import fork_context
from tests.support.kv_links import SocketLink
from tests.support.transport_endpoints import MAKERS, reserve_region
from tests.support.waits import await_value

WAIT_S = 60.0
FINGERPRINT = Fingerprint("model", KvLayout("float32", 16, 2, 2, 8))
BLOCK_BYTES = 65536
SILENCE_S, HOLD_S = 600.0, 60.0
# On a busy machine, seconds can pass before a process runs. Limits are therefore long, and a test
# in which one must pass advances the node's clock.
CONFIG = KvWorkerConfig(
    receiver=ReceiverConfig(lease_s=300.0, silence_s=SILENCE_S, fence_age_s=SILENCE_S),
    sender=SenderConfig(hold_s=HOLD_S),
    redial_s=0.2,
)


@dataclass(frozen=True, slots=True)
class NodePlan:
    kind: str  # of transport
    address: str  # of its control link
    num_blocks: int = 64
    block_bytes: int = BLOCK_BYTES


@dataclass(slots=True)
class Clock:
    """Monotonic clock that can be advanced."""

    offset_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset_s


@dataclass(slots=True)
class NodeState:
    """State of the child process: a KV worker and the memory it serves."""

    worker: KvTransferWorker
    region: Region
    buffer: Any
    clock: Clock
    reports: KvReports = KvReports()
    times: dict[HandoffId, float] = field(default_factory=dict)

    def order(self, orders: KvOrders) -> None:
        self.worker.start(orders, self.clock())

    def advance_clock(self, by_s: float) -> None:
        self.clock.offset_s += by_s

    def turn(self) -> None:
        found = self.worker.poll(self.clock())
        if found != KvReports():
            names = ("finished_recving", "failed_recving", "proved", "released", "finished_sending")
            self.reports = replace(
                self.reports, **{n: getattr(self.reports, n) + getattr(found, n) for n in names}
            )

    def seen(self) -> KvReports:
        return self.reports

    def counters(self) -> KvCounters:
        return self.worker.counters()

    def records(self) -> tuple[TransferRecord, ...]:
        return self.worker.take_records()

    def fill_all(self, byte: bytes, block_ids: tuple[BlockId, ...]) -> None:
        """Fill blocks with a byte, as a forward pass or a new owner would."""
        for block_id in block_ids:
            ctypes.memset(self._address(block_id), byte[0], self.region.block_bytes)

    def num_filled(self, byte: bytes, block_ids: tuple[BlockId, ...]) -> int:
        """Return the number of blocks that consist of this byte alone."""
        whole = byte * self.region.block_bytes
        size = self.region.block_bytes
        return sum(ctypes.string_at(self._address(b), size) == whole for b in block_ids)

    def num_touched(self, byte: bytes, block_ids: tuple[BlockId, ...]) -> int:
        """Return the number of blocks that begin with this byte."""
        return sum(ctypes.string_at(self._address(b), 1) == byte for b in block_ids)

    def _address(self, block_id: BlockId) -> int:
        return self.region.base + block_id * self.region.block_bytes


class NodeProcess:
    """Handle of a node in a child process."""

    def __init__(self, name: str, plan: NodePlan) -> None:
        context = fork_context()
        self.peer = Peer(NodeId(name), plan.address)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, plan), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def call(self, command: str, *arguments: Any) -> Any:
        self._connection.send((command, arguments))
        return self._answer()

    def order(self, orders: KvOrders) -> None:
        self.call("order", orders)

    def order_blindly(self, orders: KvOrders) -> None:
        """Send orders without waiting for the reply, which `answer_late` takes."""
        self._connection.send(("order", (orders,)))

    def answer_late(self) -> None:
        self._answer()

    def stop(self) -> None:
        """Stop the process, and return when all its threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        await_value(self._is_stopped, what="the stop of all threads")

    def _is_stopped(self) -> bool:
        stats = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        if self.is_alive:
            self.resume()
            self._connection.send(None)
            self._process.join(WAIT_S)
        self.kill()

    def until(self, holds: Callable[[KvReports], bool], what: str) -> KvReports:
        reports: KvReports = await_value(lambda: self.call("seen"), holds, what=what)
        return reports

    def _answer(self) -> Any:
        if not self._connection.poll(WAIT_S):
            raise TimeoutError("the node did not answer")
        return self._connection.recv()


def _serve(connection: Connection, name: str, plan: NodePlan) -> None:
    Path(plan.address).unlink(missing_ok=True)  # the socket of a killed predecessor
    region, buffer = reserve_region(plan.num_blocks, plan.block_bytes)
    link = SocketLink(plan.address, wake=lambda: None)
    identity = Identity(NodeId(name), Incarnation(os.urandom(4).hex()), FINGERPRINT)
    transport, clock = MAKERS[plan.kind](region), Clock()
    with KvTransferWorker(identity, region, transport, link, CONFIG, clock) as worker:
        link.events = worker.inbox
        state = NodeState(worker, region, buffer, clock)
        connection.send("ready")
        while True:
            state.turn()
            wait_s = worker.next_poll_s(clock())
            if connection.poll(min(wait_s if wait_s is not None else 0.005, 0.005)):
                request = connection.recv()
                if request is None:
                    return
                command, arguments = request
                connection.send(getattr(state, command)(*arguments))
