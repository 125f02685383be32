"""Simulation of a decode node, prefill nodes, their links and their wire, driven by a test.

The prefill nodes send to the decode node. Each node can also pull cached blocks of any other: the
blocks are named by their content.

The worker halves are the real ones, over the in-memory transport. The world plays the two
schedulers (blocks are taken over by a new owner, and overwritten, the moment they are reported
free) and watches every byte that lands.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.ids import BlockId, HandoffId, Incarnation, NodeId, Peer
from baton.core.output import FirstToken
from baton.kv_transfer.config import KvWorkerConfig, ReceiverConfig, SenderConfig
from baton.kv_transfer.layout import KvLayout
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.protocol.messages import Fingerprint, Grant, LinkMessage
from baton.kv_transfer.transports.base import Transport
from baton.kv_transfer.transports.pinned import PinnedTransport
from baton.kv_transfer.types import (
    Complete,
    KvOrders,
    KvReports,
    Proved,
    Receive,
    Requested,
    Send,
    Withdraw,
)
from baton.kv_transfer.worker import KvTransferWorker
from tests.support.kv_links import HubLink, LinkHub
from tests.support.lagging_memory import BLOCK_BYTES, LaggingMemory, Memory
from tests.support.memory_transport import MemoryChannel, MemoryTransport, Wire
from tests.support.staged_memory import StagedMemory

MAX_SETTLE_STEPS, SETTLE_STEP_S = 100, 2.0
FINGERPRINT = Fingerprint("model", KvLayout("float32", 16, 2, 2, 8))
CONFIG = KvWorkerConfig(
    receiver=ReceiverConfig(lease_s=3, silence_s=7, fence_age_s=7, give_up_s=60),
    sender=SenderConfig(
        hold_s=20,
        write_timeout_s=15,
        max_in_flight_bytes=4 * BLOCK_BYTES,
        max_write_bytes=2 * BLOCK_BYTES,
    ),
    verify=False,  # a digest would hide writes that must not happen
)


class Node:
    """Simulated process: memory, KV worker and free blocks."""

    def __init__(self, world: World, name: str, num_blocks: int, config: KvWorkerConfig) -> None:
        self.name = self.address = name
        lags, staging = world.lags and name != "d", None
        self.memory = LaggingMemory(num_blocks) if lags else Memory(num_blocks)
        transport: Transport = MemoryTransport(self.memory.region, world.wire)
        if world.stages:
            self.memory = memory = StagedMemory(num_blocks, lags=lags)
            memory.witness = world.witness_copy
            slots, staging = memory.slots.region, memory.staging
            transport = PinnedTransport(MemoryTransport(slots, world.wire), slots, memory.copy_out)
        self.link: HubLink = world.hub.link(name)
        self.link.is_held = True
        incarnation = Incarnation(f"{name}/{next(world.numbers)}")
        self.worker = world.worker(
            Identity(NodeId(name), incarnation, FINGERPRINT),
            self.memory.region,
            transport,
            self.link,
            config,
            clock=lambda: world.now,
            hash_blocks=self.memory.hash if isinstance(self.memory, LaggingMemory) else None,
            staging=staging,
        )
        self.link.events = self.worker.inbox
        self.free = [BlockId(block) for block in range(num_blocks)]
        self.is_stopped = False  # SIGSTOP: it takes no turn
        self.num_layers_ended: int | None = None  # of the pass under way
        self.cached: dict[bytes, BlockId] = {}
        self.num_given: Counter[BlockId] = Counter()  # cached blocks that are sent to peers
        self.requested: list[Requested] = []  # that are not answered yet

    @property
    def target_base(self) -> int:
        """Address of the memory that peers write."""
        memory = self.memory.staged if isinstance(self.memory, StagedMemory) else self.memory
        return memory.region.base

    @property
    def bases(self) -> set[int]:
        """Addresses of the memories of its channels."""
        memory = self.memory
        own = [memory.slots] if isinstance(memory, StagedMemory) else []
        return {self.target_base, *(each.region.base for each in own)}


@dataclass(slots=True)
class Receiving:
    """A receive as the scheduler of its node knows it. Its blocks are held until it ends."""

    node: Node
    block_ids: tuple[BlockId, ...]
    labels: Sequence[int]  # say what the blocks should hold
    names: tuple[bytes, ...] = ()  # of a pull
    is_lost: bool = False
    is_revoked: bool = False
    num_proved: int = 0  # leading blocks that are valid although it was lost


@dataclass(slots=True)
class Sending:
    """A send as P's scheduler knows it."""

    node: Node
    block_ids: list[BlockId]
    labels: Sequence[int]
    num_state_blocks: int = 0  # the last ones, computed by the last pass and sent with its blocks
    num_sent: int = 0
    num_coming: int = 0  # after those sent, of the pass under way
    has_final_order: bool = False

    @property
    def num_token_blocks(self) -> int:
        return len(self.block_ids) - self.num_state_blocks

    @property
    def state_places(self) -> range:
        """The places of the state, if the pass under way computes the last tokens."""
        is_last = self.num_coming and self.num_sent + self.num_coming == self.num_token_blocks
        return range(self.num_token_blocks if is_last else len(self.block_ids), len(self.block_ids))


class BrokenPromise(AssertionError):
    """Violation of a guarantee of the hand-off."""


@dataclass(slots=True)
class World:
    wire: Wire = field(default_factory=Wire)
    num_blocks: int = 8
    config: KvWorkerConfig = CONFIG
    lags: bool = False  # whether the prefill nodes' devices compute asynchronously
    stages: bool = False  # whether all nodes are on devices that no data path reaches
    waits_at_pass_end: bool = True  # else the fences are checked at the next orders
    worker: type[KvTransferWorker] = KvTransferWorker
    hub: LinkHub = field(init=False)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    now: float = 100.0
    d: Node = field(init=False)
    ps: dict[str, Node] = field(default_factory=dict)
    doubles: list[Node] = field(default_factory=list)  # whose node id a later process has as well
    receiving: dict[HandoffId, Receiving] = field(default_factory=dict)
    sending: dict[HandoffId, Sending] = field(default_factory=dict)
    ended: set[HandoffId] = field(default_factory=set)
    finished: set[HandoffId] = field(default_factory=set)
    begun: set[HandoffId] = field(default_factory=set)
    # Tickets are numbered by each node, whose memory has an address of its own.
    handoff_by_ticket: dict[tuple[int, int], HandoffId] = field(default_factory=dict)
    granted: dict[HandoffId, tuple[BlockId, ...]] = field(default_factory=dict)
    giving: dict[HandoffId, tuple[Node, tuple[BlockId, ...]]] = field(default_factory=dict)
    requested: set[HandoffId] = field(default_factory=set)
    landed: set[HandoffId] = field(default_factory=set)
    num_proved: int = 0  # blocks of lost hand-offs that are valid

    def __post_init__(self) -> None:
        self.hub = LinkHub(spy=self._see)
        self.wire.witness = self._witness
        self.d = Node(self, "d", self.num_blocks, self.config)
        for name in ("p0", "p1"):
            self.ps[name] = Node(self, name, self.num_blocks, self.config)

    # --- Scheduler of D ----------------------------------------------------------------

    def receive(
        self,
        handoff_id: HandoffId,
        p: str,
        first_block: int,
        num_blocks: int,
        labels: Sequence[int] | None = None,
    ) -> bool:
        """Start a receive. Return False if D has too few blocks."""
        if len(self.d.free) < num_blocks or handoff_id in self.receiving:
            return False
        blocks = tuple(self.d.free.pop() for _ in range(num_blocks))
        labels = range(first_block, first_block + num_blocks) if labels is None else labels
        self.receiving[handoff_id] = Receiving(self.d, blocks, labels)
        source = Peer(NodeId(p), p)
        order = Receive(handoff_id, source, first_block, blocks, num_tokens=num_blocks)
        self._order(self.d, KvOrders(receives=(order,)))
        return True

    def revoke(self, handoff_id: HandoffId) -> None:
        receiving = self.receiving[handoff_id]
        receiving.is_revoked = True
        self._order(receiving.node, KvOrders(revokes=(handoff_id,)))

    # --- Pulls -------------------------------------------------------------------------

    def cache(self, node: Node, name: bytes) -> None:
        """Put a block into the prefix cache of a node that has a free one."""
        if node.free and name not in node.cached:
            node.cached[name] = node.free.pop()
            node.memory.put(node.cached[name], name.ljust(BLOCK_BYTES))
            node.memory.drain()  # it is cached after its pass

    def evict(self, node: Node, name: bytes) -> None:
        """Evict a cached block, unless it is sent to a peer."""
        block = node.cached[name]
        if not node.num_given[block]:
            del node.cached[name]
            node.memory.put(block, b"reused!!")
            node.free.append(block)

    def pull(self, node: Node, holder: str, names: tuple[bytes, ...]) -> HandoffId | None:
        """Start a pull. Returns None if the node has too few blocks."""
        if len(node.free) < len(names):
            return None
        blocks = tuple(node.free.pop() for _ in names)
        handoff_id = HandoffId(f"pull {node.name}", next(self.numbers))
        self.receiving[handoff_id] = Receiving(node, blocks, range(len(names)), names)
        source = Peer(NodeId(holder), holder)
        order = Receive(handoff_id, source, 0, blocks, num_tokens=len(names), names=names)
        self._order(node, KvOrders(receives=(order,)))
        return handoff_id

    def answer_pull(self, node: Node) -> None:
        """Give the blocks of the oldest pull that this node was asked for, or refuse."""
        requested = node.requested.pop(0)
        handoff_id = requested.handoff_id
        found = tuple(node.cached[name] for name in requested.names if name in node.cached)
        if len(found) < len(requested.names):
            self.giving[handoff_id] = node, ()
            self._order(node, KvOrders(withdraws=(Withdraw(handoff_id, "not cached"),)))
            return
        self.giving[handoff_id] = node, found
        node.num_given.update(found)
        complete = Complete(handoff_id, len(found), None)
        self._order(node, KvOrders(sends=(Send(handoff_id, 0, found),), completes=(complete,)))

    def _answer_all(self) -> None:
        for node in self.nodes:
            while node.requested:
                self.answer_pull(node)

    # --- Scheduler of a P --------------------------------------------------------------

    def begin(
        self,
        handoff_id: HandoffId,
        p: str,
        num_blocks: int,
        labels: Sequence[int] | None = None,
        num_state_blocks: int = 0,
    ) -> bool:
        """Start a prompt on P: its blocks are computed but not sent."""
        node, labels = self.ps[p], range(num_blocks) if labels is None else labels
        if len(node.free) < num_blocks or handoff_id in self.begun:
            return False
        self.begun.add(handoff_id)
        blocks = [node.free.pop() for _ in range(num_blocks)]
        for label, block in zip(labels, blocks, strict=True):
            node.memory.put(block, content_of(handoff_id, label))
        node.memory.drain()  # the passes that computed them are over
        self.sending[handoff_id] = Sending(node, blocks, labels, num_state_blocks)
        return True

    def begin_pass(self, node: Node, num_blocks_by_handoff: dict[HandoffId, int]) -> None:
        """Start a pass that computes the unsent blocks layer by layer."""
        orders = []
        for handoff_id, num_blocks in num_blocks_by_handoff.items():
            sending = self.sending[handoff_id]
            start = sending.num_sent
            end = min(start + num_blocks, sending.num_token_blocks)
            blocks = tuple(sending.block_ids[start:end])
            if sending.has_final_order or not blocks:
                continue
            sending.num_coming = len(blocks)
            state = (sending.block_ids[place] for place in sending.state_places)
            for block in (*blocks, *state):
                node.memory.put(block, b"not yet!")
            orders.append(Send(handoff_id, start, blocks))
        node.num_layers_ended = 0
        self._order(node, KvOrders(layer_sends=tuple(orders)))

    def end_layer(self, node: Node) -> None:
        if node.num_layers_ended is None:
            return
        layer, layer_bytes = node.num_layers_ended, BLOCK_BYTES // FINGERPRINT.layout.num_layers
        part = slice(layer * layer_bytes, (layer + 1) * layer_bytes)
        for handoff_id, sending in self._in_pass(node).items():
            for place in range(sending.num_sent, sending.num_sent + sending.num_coming):
                held = bytearray(node.memory.computed(sending.block_ids[place]))
                held[part] = content_of(handoff_id, sending.labels[place])[part]
                node.memory.put(sending.block_ids[place], bytes(held))
            for place in sending.state_places if layer + 1 == FINGERPRINT.layout.num_layers else ():
                state = content_of(handoff_id, sending.labels[place])
                node.memory.put(sending.block_ids[place], state)
        node.num_layers_ended += 1
        node.worker.layer_done(layer, self.now, node.memory.fence())

    def end_pass(self, node: Node) -> None:
        """Send the computed blocks."""
        while (
            node.num_layers_ended is not None
            and node.num_layers_ended < FINGERPRINT.layout.num_layers
        ):
            self.end_layer(node)
        if node.num_layers_ended is not None and self.waits_at_pass_end:
            node.worker.pass_done(self.now)
        node.num_layers_ended = None
        for handoff_id, sending in self._in_pass(node).items():
            num_blocks, sending.num_coming = sending.num_coming, 0
            self.send(handoff_id, num_blocks)

    def _in_pass(self, node: Node) -> dict[HandoffId, Sending]:
        return {
            handoff_id: sending
            for handoff_id, sending in self.sending.items()
            if sending.node is node and sending.num_coming and not sending.has_final_order
        }

    def send(self, handoff_id: HandoffId, num_blocks: int) -> None:
        sending = self.sending[handoff_id]
        if sending.num_coming:
            self.end_pass(sending.node)
        start, end = sending.num_sent, sending.num_sent + num_blocks
        end = end if end < sending.num_token_blocks else len(sending.block_ids)
        blocks = tuple(sending.block_ids[start:end])
        if not blocks or sending.has_final_order:
            return
        sending.num_sent += len(blocks)
        self._order(sending.node, KvOrders(sends=(Send(handoff_id, start, blocks),)))

    def complete(self, handoff_id: HandoffId) -> None:
        sending = self.sending[handoff_id]
        if not sending.has_final_order:
            self.end_pass(sending.node)
            self.send(handoff_id, len(sending.block_ids))
            sending.has_final_order = True
            order = Complete(handoff_id, len(sending.block_ids), FirstToken(7))
            self._order(sending.node, KvOrders(completes=(order,)))

    def withdraw(self, handoff_id: HandoffId) -> None:
        sending = self.sending[handoff_id]
        if not sending.has_final_order:
            sending.has_final_order = True
            self._order(sending.node, KvOrders(withdraws=(Withdraw(handoff_id, "aborted"),)))

    # --- Faults of processes -----------------------------------------------------------

    def restart_p(self, name: str) -> None:
        """Kill P and start a new process at its address."""
        self.kill_p(name)
        self.ps[name] = Node(self, name, self.num_blocks, self.config)

    def kill_p(self, name: str) -> None:
        """Kill P. Its writes can still be in flight."""
        self._kill(self.ps.pop(name))

    def double_p(self, name: str) -> None:
        """Freeze P, and start a second process with its node id at its address."""
        frozen = self.ps[name]
        frozen.is_stopped = True
        self.doubles.append(frozen)
        frozen.address = f"{name} before {next(self.numbers)}"
        self.hub.move(name, frozen.address)
        self.ps[name] = Node(self, name, self.num_blocks, self.config)

    def kill_doubles(self) -> None:
        """Kill the first of all processes that share a node id."""
        while self.doubles:
            self._kill(self.doubles.pop())

    def _kill(self, dead: Node) -> None:
        self.hub.remove(dead.address)
        self._bury(dead)
        self.sending = {h: s for h, s in self.sending.items() if s.node is not dead}

    def restart_d(self) -> None:
        dead, self.d = self.d, Node(self, "d-", 1, self.config)
        self.hub.remove("d-")
        self.hub.remove(dead.address)
        self._bury(dead)
        self.d = Node(self, "d", self.num_blocks, self.config)

    def _bury(self, dead: Node) -> None:
        """End the memory, the channels and the hand-offs of a process that was killed."""
        for channel in self._channels_of(dead):
            for flight in [one for one in self.wire.flights if one.target is channel]:
                self.wire.fail(flight)
                self.wire.lose(flight)
            for flight in [one for one in self.wire.flights if one.source is channel]:
                if self.wire.is_direct:
                    self.wire.lose(flight)  # its writer is dead
            self.wire.notices = [one for one in self.wire.notices if one[0] is not channel]
            self.wire.cancels = [one for one in self.wire.cancels if one[0] is not channel]
            channel.close()
            channel.is_gone = True
        lost = {h for h, receiving in self.receiving.items() if receiving.node is dead}
        self.ended |= lost
        self.receiving = {h: r for h, r in self.receiving.items() if h not in lost}
        base = dead.target_base
        self.handoff_by_ticket = {k: h for k, h in self.handoff_by_ticket.items() if k[0] != base}
        self.giving = {h: given for h, given in self.giving.items() if given[0] is not dead}

    def _channels_of(self, node: Node) -> list[MemoryChannel]:
        return [one for one in self.wire.channels.values() if one.region.base in node.bases]

    # --- Turns -------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        return [self.d, *self.ps.values(), *self.doubles]

    @property
    def staged_memories(self) -> list[StagedMemory]:
        return [node.memory for node in self.nodes if isinstance(node.memory, StagedMemory)]

    def turn(self, node: Node) -> None:
        if not node.is_stopped:
            self._take_reports(node, node.worker.poll(self.now))

    def turn_all(self) -> None:
        for node in self.nodes:
            self.turn(node)

    def settle(self) -> None:
        """Deliver everything in flight and let timeouts pass until no hand-off is open."""
        for node in self.nodes:
            node.is_stopped = False
        for _ in range(MAX_SETTLE_STEPS):
            self.exchange()
            self._answer_all()
            is_busy = self.receiving or self.sending or self.giving or self.wire.flights
            if not (is_busy or self._open_handoffs()):
                return
            self.now += SETTLE_STEP_S

    def exchange(self) -> None:
        """Deliver everything in flight and run all workers, up to four times."""
        for _ in range(4):
            for node in self.nodes:
                node.link.pass_all()
            self.wire.deliver_all()
            for memory in self.staged_memories:
                memory.land_copies()
            self.turn_all()
            is_copying = any(memory.is_copying for memory in self.staged_memories)
            is_queued = any(node.link.queued for node in self.nodes)
            if self.wire.is_idle and not (is_queued or is_copying):
                return

    def _open_handoffs(self) -> list[HandoffId]:
        return [one for node in self.nodes for one in node.worker.open_handoffs()]

    def check_all_free(self) -> None:
        if self.receiving or self.sending:
            raise BrokenPromise(f"never ended: {self.receiving} {self.sending}")
        for node in self.nodes:
            for name in list(node.cached):
                self.evict(node, name)
            if sorted(node.free) != list(range(self.num_blocks)):
                raise BrokenPromise(f"{node.name} lost blocks: {sorted(node.free)} are free")
        if self._open_handoffs():
            raise BrokenPromise(f"a worker half still holds {self._open_handoffs()}")

    def _order(self, node: Node, orders: KvOrders) -> None:
        node.worker.start(orders, self.now)

    # --- Invariants --------------------------------------------------------------------

    def _take_reports(self, node: Node, reports: KvReports) -> None:
        for landed in reports.finished_recving:
            self._landed(landed.handoff_id)
        for lost in reports.failed_recving:
            receiving = self.receiving[lost.handoff_id]
            if receiving.is_lost or receiving.is_revoked:
                raise BrokenPromise(f"{lost.handoff_id} was given up before it was lost")
            receiving.is_lost = True
        for proved in reports.proved:
            self._proved(proved)
        for handoff_id in reports.released:
            self._released(handoff_id)
        for handoff_id in reports.finished_sending:
            self._finished(handoff_id, node)
        for requested in reports.requested:
            if requested.handoff_id in self.requested:
                raise BrokenPromise(f"{requested.handoff_id} was requested twice")
            self.requested.add(requested.handoff_id)
            node.requested.append(requested)

    def _landed(self, handoff_id: HandoffId) -> None:
        receiving = self.receiving[handoff_id]
        if receiving.is_lost:
            raise BrokenPromise(f"{handoff_id} landed after it was lost")
        self._check_contents(handoff_id, len(receiving.block_ids))
        self.landed.add(handoff_id)
        self._give_back(handoff_id, has_landed=True)

    def _proved(self, proved: Proved) -> None:
        receiving = self.receiving[proved.handoff_id]
        if receiving.num_proved or not (receiving.is_lost or receiving.is_revoked):
            raise BrokenPromise(f"{proved.handoff_id} was proved twice, or before it was given up")
        receiving.num_proved = proved.num_blocks
        self.num_proved += proved.num_blocks
        self._check_contents(proved.handoff_id, proved.num_blocks)

    def _check_contents(self, handoff_id: HandoffId, num_blocks: int) -> None:
        receiving = self.receiving[handoff_id]
        blocks = list(zip(receiving.labels, receiving.block_ids, strict=True))
        for label, block in blocks[:num_blocks]:
            got = receiving.node.memory.get(block)
            name = receiving.names[label] if receiving.names else None
            expected = content_of(handoff_id, label) if name is None else name.ljust(BLOCK_BYTES)
            if got != expected:
                raise BrokenPromise(f"{handoff_id} landed with {got!r} for {expected!r}")

    def _released(self, handoff_id: HandoffId) -> None:
        if handoff_id in self.ended:
            raise BrokenPromise(f"{handoff_id} was released twice")
        receiving = self.receiving[handoff_id]
        if not (receiving.is_lost or receiving.is_revoked):
            raise BrokenPromise(f"{handoff_id} was released before it was given up")
        self._give_back(handoff_id)

    def _give_back(self, handoff_id: HandoffId, *, has_landed: bool = False) -> None:
        self.ended.add(handoff_id)
        receiving = self.receiving.pop(handoff_id)
        node, names = receiving.node, receiving.names or (None,) * len(receiving.block_ids)
        for block, name in zip(receiving.block_ids, names, strict=True):
            if has_landed and name is not None and name not in node.cached:
                node.cached[name] = block
                continue
            node.memory.put(block, b"new user")
            node.free.append(block)

    def _finished(self, handoff_id: HandoffId, node: Node) -> None:
        if handoff_id in self.finished:
            raise BrokenPromise(f"{handoff_id} finished sending twice")
        self.finished.add(handoff_id)
        if handoff_id in self.giving:
            giver, given = self.giving.pop(handoff_id)
            node.num_given.subtract(given)
            self._check_nothing_reads(giver, [each for each in given if not node.num_given[each]])
            return
        sending = self.sending.pop(handoff_id)
        if not sending.has_final_order or sending.node is not node:
            raise BrokenPromise(f"{handoff_id} finished before the last word on it")
        self._check_nothing_reads(node, sending.block_ids)
        for block in sending.block_ids:
            node.memory.put(block, b"reused!!")
            node.free.append(block)

    def _check_nothing_reads(self, node: Node, block_ids: Sequence[BlockId]) -> None:
        for flight in self.wire.flights:
            is_same_node = flight.source.region == node.memory.region
            is_reading = is_same_node and not flight.source.is_closed and not flight.is_acknowledged
            if is_reading and set(flight.write.sources) & set(block_ids):
                raise BrokenPromise("a source block was given back while a write reads it")

    def witness_copy(self, handoff_id: HandoffId, block: BlockId) -> None:
        receiving = self.receiving.get(handoff_id)
        if receiving is None or block not in receiving.block_ids:
            raise BrokenPromise(f"a copy of {handoff_id} landed in block {block} of a new owner")

    def _witness(self, channel: MemoryChannel, ticket: int, block: BlockId) -> None:
        handoff_id = self.handoff_by_ticket[channel.region.base, ticket]
        receiving = self.receiving.get(handoff_id)
        granted = self.granted[handoff_id]
        if receiving is None or block not in granted:
            raise BrokenPromise(f"a write of {handoff_id} landed in block {block} of a new owner")
        if self.stages:
            self._check_staging_block(handoff_id, receiving.node, block)
        if block in granted[: receiving.num_proved]:
            raise BrokenPromise(f"a write of {handoff_id} landed in block {block}, which was final")

    def _check_staging_block(self, handoff_id: HandoffId, node: Node, block: BlockId) -> None:
        """Check that a block of the staging area has not been lent to a later receive."""
        later = list(self.granted)[list(self.granted).index(handoff_id) + 1 :]
        for other in later:
            receiving = self.receiving.get(other)
            if receiving and receiving.node is node and block in self.granted[other]:
                raise BrokenPromise(f"a write of {handoff_id} landed in a block of {other}")

    def _see(self, message: LinkMessage) -> None:
        if isinstance(message, Grant):
            base = self.receiving[message.handoff_id].node.target_base
            self.handoff_by_ticket[base, message.ticket] = message.handoff_id
            self.granted[message.handoff_id] = message.block_ids


def content_of(handoff_id: HandoffId, label: int) -> bytes:
    """Return the content of a block of this hand-off, unique among all blocks."""
    return f"{handoff_id.request_id}#{handoff_id.attempt:x}.{label:x}".encode().ljust(BLOCK_BYTES)
