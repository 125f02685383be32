"""One side of `python -m benchmarks kv`, as a process: memory, real KV workers, and raw channels.

Like a node it has an engine thread, which sleeps in its mailbox for as long as the worker allows,
and control links over gRPC. Two workers serve the same memory, one with digests and one without;
they are never busy at the same time.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from baton.core.ids import BlockId, HandoffId, Incarnation, NodeId, Peer
from baton.core.output import FirstToken
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.kv_transfer.config import KvWorkerConfig
from baton.kv_transfer.layout import KvLayout
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.protocol.messages import Fingerprint, Region
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.kv_transfer.transports.base import Arrived, Channel, Write, Written
from baton.kv_transfer.types import Complete, KvOrders, Receive, Send
from baton.kv_transfer.worker import KvTransferWorker
from baton.measured_process import open_transport, poll_until
from baton.node.kv.link import GrpcLinks
from baton.node.servicer import KvLinkServicer
from baton.rpc.server import Service, serving
from baton.v1 import kv_link_pb2_grpc
from benchmarks.kv.prefill import Prefill, PrefillTimes, compute

HOST = "127.0.0.1"
NUM_TOKENS = 16  # arbitrary: nothing is decoded


@dataclass(frozen=True, slots=True)
class EndPlan:
    name: str
    transport: str  # nixl or ucxx
    tls: str  # UCX_TLS; empty: UCX chooses
    block_bytes: int
    num_layers: int
    memory_bytes: int
    cpus: tuple[int, ...]  # cores of this side alone
    whole_bytes: tuple[int, ...]  # sizes of the contiguous reference writes


@dataclass(frozen=True, slots=True)
class HandOffTimes:
    """Monotonic seconds, comparable between the processes of a machine."""

    began_s: float  # D: order of the scheduler; P: first posted write
    ended_s: float  # D: landed; P: completion of the last write seen


@dataclass(slots=True)
class _Station:
    """KV worker with its own links and address."""

    worker: KvTransferWorker
    peer: Peer


class BenchFailed(RuntimeError):
    """A measurement failed."""


def serve_end(connection: Connection, plan: EndPlan) -> None:
    """Execute commands until the pipe is closed, also by the end of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if plan.cpus:
        os.sched_setaffinity(0, plan.cpus)
    asyncio.run(_serve(connection, plan))


async def _serve(connection: Connection, plan: EndPlan) -> None:
    memory = _Memory(plan)
    mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    # NIXL first: once ucxx is loaded, the UCX of NIXL finds no transport but TCP.
    raw_by_bytes = {
        size: open_transport("nixl", plan.tls, memory.divided_into(size)).open()
        for size in plan.whole_bytes
    }
    async with AsyncExitStack() as stack:
        stations = {
            verify: await stack.enter_async_context(_station(plan, memory.region, verify, mail))
            for verify in (False, True)
        }
        end = _KvEnd(plan, memory, raw_by_bytes, stations, connection, mail)
        threading.Thread(target=end.listen, daemon=True).start()
        await asyncio.to_thread(end.run)
        for station in stations.values():
            station.worker.__exit__(None, None, None)


@asynccontextmanager
async def _station(
    plan: EndPlan,
    region: Region,
    verify: bool,
    mail: queue.SimpleQueue[Callable[[], None]],
) -> AsyncIterator[_Station]:
    links = GrpcLinks()
    node_id = NodeId(f"{plan.name}-{verify}")
    fingerprint = Fingerprint("bench", KvLayout("uint8", 1, plan.num_layers, 1, plan.block_bytes))
    identity = Identity(node_id, Incarnation(os.urandom(4).hex()), fingerprint)
    transport = open_transport(plan.transport, plan.tls, region)
    worker = KvTransferWorker(identity, region, transport, links, KvWorkerConfig(verify=verify))
    links.attach(worker.inbox, lambda: mail.put(lambda: None))
    link = KvLinkServicer(links)
    service = Service(
        "baton.v1.KvLinkService",
        lambda server: kv_link_pb2_grpc.add_KvLinkServiceServicer_to_server(link, server),
    )
    async with serving(HOST, 0, (service,)) as server, links:
        yield _Station(worker, Peer(node_id, server.address))


class _Memory:
    """Memory in place of a node's KV cache, filled with random bytes."""

    def __init__(self, plan: EndPlan) -> None:
        num_blocks = plan.memory_bytes // plan.block_bytes
        self._bytes = np.frombuffer(huge_page_memory(plan.memory_bytes), dtype=np.uint8)
        noise = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
        for start in range(0, plan.memory_bytes, len(noise)):
            part = self._bytes[start : start + len(noise)]
            part[:] = noise[: len(part)]
        self.region = Region(int(self._bytes.ctypes.data), num_blocks, plan.block_bytes)

    def divided_into(self, block_bytes: int) -> Region:
        return Region(self.region.base, len(self._bytes) // block_bytes, block_bytes)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        ctypes.memmove(self.region.base + target, self.region.base + source, num_bytes)

    def fill(
        self, block_ids: tuple[BlockId, ...], layer: int, layer_bytes: int, value: int
    ) -> None:
        """Write one layer of the blocks, as a forward pass does."""
        for block_id in block_ids:
            start = block_id * self.region.block_bytes + layer * layer_bytes
            self._bytes[start : start + layer_bytes] = value


class _KvEnd:
    """Command loop of the process. Everything but `listen` runs on the engine thread."""

    def __init__(
        self,
        plan: EndPlan,
        memory: _Memory,
        raw_by_bytes: dict[int, Channel],
        stations: dict[bool, _Station],
        connection: Connection,
        mail: queue.SimpleQueue[Callable[[], None]],
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._stations = stations
        self._connection = connection
        self._mail = mail
        self._raw_by_bytes = raw_by_bytes
        self._scattered = open_transport(plan.transport, plan.tls, memory.region).open()
        self._is_stopping = False
        self._awaited: HandoffId | None = None
        self._times: dict[HandoffId, HandOffTimes] = {}
        connection.send("ready")

    def listen(self) -> None:
        """Put commands of the parent into the mailbox, on a thread of its own."""
        while True:
            try:
                command, arguments = self._connection.recv()
            except (EOFError, OSError):
                self._mail.put(self._stop)
                return
            self._mail.put(partial(self._execute, command, arguments))

    def run(self) -> None:
        while not self._is_stopping:
            self._read_mail()
            for station in self._stations.values():
                self._poll(station)
        for channel in (*self._raw_by_bytes.values(), self._scattered):
            channel.close()

    def _read_mail(self) -> None:
        """Wait for mail like the engine thread and run it."""
        now = time.monotonic()
        waits = [station.worker.next_poll_s(now) for station in self._stations.values()]
        wait_s = min((wait for wait in waits if wait is not None), default=1.0)
        try:
            self._mail.get(timeout=wait_s)() if wait_s > 0 else self._mail.get_nowait()()
            while True:
                self._mail.get_nowait()()
        except queue.Empty:
            return

    def _poll(self, station: _Station) -> None:
        reports = station.worker.poll(time.monotonic())
        if reports.failed_recving:
            raise BenchFailed(f"{self._plan.name}: {reports.failed_recving}")
        for record in station.worker.take_records():
            self._times[record.handoff_id] = _times_of(record)
        if self._awaited in self._times:
            self._connection.send(self._times.pop(self._awaited))
            self._awaited = None

    def _stop(self) -> None:
        self._is_stopping = True

    def _execute(self, command: str, arguments: tuple[Any, ...]) -> None:
        answer = getattr(self, command)(*arguments)
        if answer is not None:
            self._connection.send(answer)

    # --- Hand-offs ---------------------------------------------------------------------------

    def peers(self) -> dict[bool, Peer]:
        return {verify: station.peer for verify, station in self._stations.items()}

    def receive(
        self, verify: bool, handoff_id: HandoffId, peer: Peer, blocks: tuple[BlockId, ...]
    ) -> None:
        """Start receiving; the answer is sent when the KV has landed."""
        self._awaited = handoff_id
        order = Receive(handoff_id, peer, 0, blocks, NUM_TOKENS)
        self._stations[verify].worker.start(KvOrders(receives=(order,)), time.monotonic())

    def hold(self, verify: bool, handoff_id: HandoffId, blocks: tuple[BlockId, ...]) -> bool:
        """Offer blocks as completely computed; they wait for the grant of D."""
        orders = KvOrders(
            sends=(Send(handoff_id, 0, blocks),),
            completes=(Complete(handoff_id, NUM_TOKENS, FirstToken(0)),),
        )
        self._stations[verify].worker.start(orders, time.monotonic())
        return True

    def sent(self, handoff_id: HandoffId) -> None:
        """Send the answer when no write of the hand-off is in flight."""
        self._awaited = handoff_id

    def prefill(self, verify: bool, prefill: Prefill) -> PrefillTimes:
        """Compute in chunks and push KV like an engine."""
        layer_bytes = self._plan.block_bytes // self._plan.num_layers

        def fill(blocks: tuple[BlockId, ...], layer: int, value: int) -> None:
            self._memory.fill(blocks, layer, layer_bytes, value)

        return compute(prefill, self._stations[verify].worker, self._plan.num_layers, fill)

    # --- References --------------------------------------------------------------------------

    def metadata(self, size: int | None) -> tuple[bytes, Region]:
        region = self._memory.divided_into(size) if size else self._memory.region
        return self._raw(size).metadata, region

    def connect(self, size: int | None, metadata: bytes, region: Region) -> bool:
        self._raw(size).connect(metadata, region)
        return True

    def copy(self, source: int, target: int, num_bytes: int) -> float:
        began_s = time.perf_counter()
        self._memory.copy(source, target, num_bytes)
        return time.perf_counter() - began_s

    def take_write(self, size: int | None, ticket: int, blocks: tuple[BlockId, ...]) -> float:
        """D: poll until the write has arrived."""
        channel = self._raw(size)
        channel.expect(ticket, blocks)
        poll_until(channel, Arrived(ticket))
        return time.monotonic()

    def write(self, size: int | None, write: Write) -> HandOffTimes:
        """P: time one write with nothing else running."""
        channel = self._raw(size)
        began_s = time.monotonic()
        channel.post(write)
        poll_until(channel, Written(write.write_id))
        times = HandOffTimes(began_s, time.monotonic())
        channel.notify(write.ticket, b"")
        while not self._mail.qsize():  # polling drives the notification until D has it
            channel.poll()
        return times

    def rest(self) -> bool:
        """P: return from `write`, since D has received everything."""
        return True

    def _raw(self, size: int | None) -> Channel:
        return self._scattered if size is None else self._raw_by_bytes[size]


def _times_of(record: TransferRecord) -> HandOffTimes:
    if record.role is TransferRole.RECEIVED:
        return HandOffTimes(record.began_s, record.ended_s or math.nan)
    return HandOffTimes(record.first_post_s or math.nan, record.last_written_s or math.nan)
