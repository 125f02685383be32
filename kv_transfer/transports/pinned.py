"""Transport that sends blocks of a device out of pinned host memory.

For transports that cannot read the device. Each write waits for a copy of its blocks into slots of
pinned memory, and is then posted from there, in parts if there are too few slots. What arrives is
written to the staging area, in host memory too (`protocol/conversion.py`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.core.ids import BlockId
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import (
    Channel,
    ChannelEvent,
    LayerRange,
    Transport,
    Write,
    WriteFailed,
    Written,
)

# Begins to copy layers of blocks into the same layers of slots. They are there once the fence has
# passed. Copies are made in the order of the calls.
CopyOut = Callable[[Sequence[BlockId], LayerRange, Sequence[BlockId]], Fence]
NUM_SHARES = 16  # of the reserved slots


class PinnedSlots:
    """Slots of pinned memory, each for a block, that all channels share.

    A channel takes no more than it leaves free, and of the last quarter only a share: frozen peers
    keep their slots until their pairs are cut, and others need some meanwhile.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = [BlockId(slot) for slot in range(num_slots)]
        self._num_reserved = num_slots // 4
        self._share = max(1, self._num_reserved // NUM_SHARES)

    def num_for(self, num_held: int) -> int:
        """Return how many more slots a channel may take that holds so many."""
        num_free = len(self._free)
        num_common = min((num_free - num_held + 1) // 2, num_free - self._num_reserved)
        return max(0, num_common, min(self._share - num_held, num_free))

    def take(self, number: int) -> tuple[BlockId, ...]:
        """Take the first free slots, which are neighbours if few are in use."""
        return tuple(heapq.heappop(self._free) for _ in range(number))

    def give_back(self, slots: Sequence[BlockId]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)


class PinnedTransport:
    """Implements `Transport` for the blocks of a device, by one for the pinned slots."""

    def __init__(self, inner: Transport, slots: Region, copy_out: CopyOut) -> None:
        self._inner = inner
        self._slots = PinnedSlots(slots.num_blocks)
        self._copy_out = copy_out
        self.name = inner.name
        self.is_one_sided = inner.is_one_sided
        self.moves_device_memory = False

    def open(self) -> PinnedChannel:
        return PinnedChannel(self._inner.open(), self._slots, self._copy_out)

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True, eq=False)
class _Posted:
    """A write of the caller."""

    write: Write
    num_copied: int = 0  # leading blocks that are copied, or being copied
    num_written: int = 0
    has_failed: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.write.sources)


@dataclass(frozen=True, slots=True, eq=False)
class _CopiedPart:
    """Blocks of a write that are in slots."""

    posted: _Posted
    write: Write  # from the slots
    copied: Fence


class PinnedChannel:
    def __init__(self, inner: Channel, slots: PinnedSlots, copy_out: CopyOut) -> None:
        self._inner = inner
        self._slots = slots
        self._copy_out = copy_out
        self._waiting: deque[_Posted] = deque()  # of which blocks have no slots yet
        self._copying: deque[_CopiedPart] = deque()
        self._part_by_write: dict[int, _CopiedPart] = {}  # posted parts
        self._num_held = 0  # slots
        self._num_parts = 0

    @property
    def metadata(self) -> bytes:
        return self._inner.metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        self._inner.connect(metadata, region)

    def receive_into(self, region: Region) -> None:
        self._inner.receive_into(region)

    @property
    def close_stops_writes(self) -> bool:
        return self._inner.close_stops_writes

    def is_peer_gone(self) -> bool:
        return self._inner.is_peer_gone()

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._inner.expect(ticket, block_ids)

    def cancel(self, ticket: int) -> None:
        self._inner.cancel(ticket)

    def post(self, write: Write) -> None:
        self._waiting.append(_Posted(write))
        self._move()

    def notify(self, ticket: int, note: bytes) -> None:
        self._inner.notify(ticket, note)

    def poll(self) -> list[ChannelEvent]:
        self._move()
        events: list[ChannelEvent] = []
        for event in self._inner.poll():
            match event:
                case Written(write_id):
                    events += self._end_part(write_id)
                case WriteFailed(write_id, reason):
                    events += self._fail(write_id, reason)
                case _:
                    events.append(event)
        self._move()  # the slots of what was written are free again
        return events

    def close(self) -> None:
        """Destroy the inner end, which reads the slots. Copies into them may still be made.

        Later copies into the same slots come after these.
        """
        self._inner.close()
        for part in (*self._copying, *self._part_by_write.values()):
            self._give_back(part)
        self._waiting.clear()
        self._copying.clear()
        self._part_by_write.clear()

    def _move(self) -> None:
        """Begin copies into free slots, and post what is copied."""
        while self._waiting and (self._room or not self._waiting[0].num_blocks):
            self._begin_copy(self._waiting[0])
            if self._waiting[0].num_copied == self._waiting[0].num_blocks:
                self._waiting.popleft()
        while self._copying and self._copying[0].copied.is_passed:
            part = self._copying.popleft()
            self._part_by_write[part.write.write_id] = part
            self._inner.post(part.write)

    @property
    def _room(self) -> int:
        return self._slots.num_for(self._num_held)

    def _give_back(self, part: _CopiedPart) -> None:
        self._slots.give_back(part.write.sources)
        self._num_held -= len(part.write.sources)

    def _begin_copy(self, posted: _Posted) -> None:
        write, first = posted.write, posted.num_copied
        end = min(posted.num_blocks, first + self._room)
        slots = self._slots.take(end - first)
        self._num_held += len(slots)
        copied = self._copy_out(write.sources[first:end], write.layers, slots)
        posted.num_copied = end
        self._num_parts += 1
        from_slots = replace(
            write,
            write_id=self._num_parts,
            first=write.first + first,
            sources=slots,
            targets=write.targets[first:end],
        )
        self._copying.append(_CopiedPart(posted, from_slots, copied))

    def _end_part(self, write_id: int) -> list[ChannelEvent]:
        part = self._part_by_write.pop(write_id)
        self._give_back(part)
        posted = part.posted
        posted.num_written += len(part.write.sources)
        is_over = posted.num_written == posted.num_blocks and not posted.has_failed
        return [Written(posted.write.write_id)] if is_over else []

    def _fail(self, write_id: int, reason: str) -> list[ChannelEvent]:
        """Report the failure of a write once, and begin no more of its parts.

        The slots of the failed part may still be read: they are free when the channel is closed.
        """
        posted = self._part_by_write[write_id].posted
        if posted.has_failed:
            return []
        posted.has_failed = True
        self._waiting = deque(each for each in self._waiting if each is not posted)
        for part in [each for each in self._copying if each.posted is posted]:
            self._copying.remove(part)
            self._give_back(part)
        return [WriteFailed(posted.write.write_id, reason)]
