"""KV worker of a node: its transport, its region of KV memory, and its hook in the forward pass."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap

from baton.core.ids import BlockId
from baton.core.units import format_bytes
from baton.engine.kv_cache.groups import KvGroup, places_done
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.loaded_runner import CachingRunner
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.layout import StagedRun
from baton.kv_transfer.link import Link
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.protocol.conversion import StagingArea
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.records import TransferRole
from baton.kv_transfer.transports.base import LayerRange, Transport, UcxConfig
from baton.kv_transfer.transports.dead_segments import SHARED_MEMORY, remove_dead_segments
from baton.kv_transfer.transports.nixl import NixlTransport, moves_device_memory
from baton.kv_transfer.transports.pinned import PinnedTransport
from baton.kv_transfer.transports.ucxx import UcxxTransport
from baton.kv_transfer.worker import KvTransferWorker
from baton.node.options import NodeOptions

logger = logging.getLogger(__name__)

SLOT_BYTES, MIN_SLOTS = 256 << 20, 2  # of pinned memory out of which a device's blocks are sent
# Notes the bytes and seconds of a copy that is done: SENT out of the device, or RECEIVED into it.
NoteStaged = Callable[[TransferRole, int, float], None]


@dataclass(frozen=True, slots=True)
class StagedCopies:
    """Copies of a KV cache's blocks. Each is noted once the KV worker has seen its end.

    Its time thus is what the copy delays a hand-off by. Copies that are given up are not noted.
    """

    blocks: KvBlocks
    note: NoteStaged
    clock: Callable[[], float]

    def copy_out(
        self,
        target: Region,
        block_ids: Sequence[BlockId],
        layers: LayerRange,
        slots: Sequence[BlockId],
    ) -> Fence:
        num_bytes = len(block_ids) * len(layers.byte_range(target.block_bytes))
        began_s = self.clock()
        copied = self.blocks.copy_out(target, block_ids, layers, slots)
        return self._noted(copied, TransferRole.SENT, num_bytes, began_s)

    def convert(self, memory: mmap, staged: StagedRun) -> Fence:
        num_bytes = staged.num_blocks * staged.source.block_bytes
        began_s = self.clock()
        copied = self.blocks.convert(memory, staged)
        return self._noted(copied, TransferRole.RECEIVED, num_bytes, began_s)

    def _noted(self, copied: Fence, role: TransferRole, num_bytes: int, began_s: float) -> Fence:
        if not num_bytes:
            return copied
        return _NotedFence(copied, partial(self._note, role, num_bytes, began_s))

    def _note(self, role: TransferRole, num_bytes: int, began_s: float) -> None:
        self.note(role, num_bytes, self.clock() - began_s)


Copies = KvBlocks | StagedCopies


class _NotedFence:
    """Fence that calls a function when it is first seen to have passed, by one thread."""

    def __init__(self, fence: Fence, note: Callable[[], None]) -> None:
        self._fence = fence
        self._note: Callable[[], None] | None = note

    @property
    def is_passed(self) -> bool:
        if self._fence.is_passed:
            self._end()
            return True
        return False

    def wait(self) -> None:
        self._fence.wait()
        self._end()

    def _end(self) -> None:
        if self._note is not None:
            note, self._note = self._note, None
            note()


@dataclass(frozen=True, slots=True)
class Around:
    """Decorators of a node's link and transport, such as fault injection."""

    link: Callable[[Link], Link] = lambda link: link
    transport: Callable[[Transport, Region], Transport] = lambda transport, _: transport


NO_NODE_DECORATORS = Around()


def make_kv_worker(
    options: NodeOptions,
    identity: Identity,
    runner: CachingRunner,
    link: Link,
    around: Around = NO_NODE_DECORATORS,
    note_staged: NoteStaged | None = None,
    clock: Callable[[], float] = time.monotonic,  # of `note_staged`
) -> KvTransferWorker:
    """`note_staged` is called for copies between a device and pinned host memory.

    Raises TransportMissing if the transport's library is not installed.
    """
    memory = runner.kv_memory
    region = Region(memory.address, memory.num_blocks, memory.block_bytes, memory.device)
    copies: Copies = runner.blocks
    if region.device != "cpu" and note_staged is not None:
        copies = StagedCopies(runner.blocks, note_staged, clock)
    staging = _make_staging(options.staging_bytes, runner, copies)
    config = replace(options.kv_worker, busy_s=options.stuck_after_s)
    area = None if staging is None else staging.region
    opened = _open_transport(options, region, area, runner.blocks, copies)
    transport = around.transport(opened, region)
    hash_blocks = None if region.device == "cpu" else runner.blocks.hash
    return KvTransferWorker(
        identity,
        region,
        transport,
        around.link(link),
        config,
        hash_blocks=hash_blocks,
        staging=staging,
    )


def _make_staging(num_bytes: int, runner: CachingRunner, copies: Copies) -> StagingArea | None:
    if not num_bytes:
        return None
    memory = huge_page_memory(num_bytes)
    if runner.kv_memory.device != "cpu":
        runner.blocks.pin(memory)
    region = Region(_address_of(memory), num_blocks=1, block_bytes=num_bytes)
    return StagingArea(region, lambda staged: copies.convert(memory, staged.staged_run))


def _open_transport(
    options: NodeOptions,
    region: Region,
    staging: Region | None,
    blocks: KvBlocks,
    copies: Copies,
) -> Transport:
    num_removed = remove_dead_segments()
    if num_removed:
        logger.info("removed %d UCX segments of dead processes in %s", num_removed, SHARED_MEMORY)
    config, kind = UcxConfig(options.kv_tls, options.kv_device), options.kv_transport
    if region.device == "cpu" or (kind == "nixl" and moves_device_memory(config)):
        return _open(kind, region, config, staging)
    slots = _make_slots(region, blocks)
    logger.info(
        "KV of %s is sent and received through %s of pinned host memory: %s cannot read or write "
        "the device here",
        region.device,
        format_bytes(slots.num_bytes + (staging.num_bytes if staging else 0)),
        "UCX has no CUDA, so nixl" if kind == "nixl" else kind,
    )
    return PinnedTransport(
        _open(kind, slots, config, staging), slots, partial(copies.copy_out, slots)
    )


def _make_slots(region: Region, blocks: KvBlocks) -> Region:
    """Return pinned memory for blocks that are sent."""
    num_slots = max(MIN_SLOTS, SLOT_BYTES // region.block_bytes)
    memory = huge_page_memory(num_slots * region.block_bytes)
    blocks.pin(memory)
    return Region(_address_of(memory), num_slots, region.block_bytes)


def _open(kind: str, region: Region, config: UcxConfig, staging: Region | None) -> Transport:
    if kind == "nixl":
        return NixlTransport(region, config, staging)
    return UcxxTransport(region, config)


def _address_of(memory: mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@dataclass(frozen=True, slots=True, eq=False)
class KvPassHook:
    """Forward-pass hook that drives KV transfers and the heartbeat during long steps."""

    worker: KvTransferWorker | None
    groups: Sequence[KvGroup]
    beat: Callable[[], None]
    post: Callable[[Callable[[], None]], None]  # calls something on the engine thread

    def layer_done(self, layer: int, fence: Fence) -> None:
        self.post(partial(self._note_layer, layer, fence))

    def pass_done(self) -> None:
        self.post(self._note_pass)

    def _note_layer(self, layer: int, fence: Fence) -> None:
        self.beat()
        if self.worker is not None:
            last_place = places_done(self.groups, layer + 1) - 1
            self.worker.layer_done(last_place, time.monotonic(), fence)

    def _note_pass(self) -> None:
        self.beat()
        if self.worker is not None:
            self.worker.pass_done(time.monotonic())
