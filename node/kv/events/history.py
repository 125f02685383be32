"""Messages for replay: the last ones, and before them the cache's content as one message. Pure.

vLLM forgets what a message said when it leaves the buffer. Here a subscriber can join at any time:
what the forgotten messages said is kept as the blocks that were cached after them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from baton.node.kv.events.messages import (
    CacheFacts,
    ClearedMessage,
    EventMessage,
    ExternalHash,
    ExtraKeys,
    Lora,
    MessageBatch,
    RemovedMessage,
    StoredMessage,
    decode_batch,
    encode_batch,
)

# Messages are forgotten when there are so many more than the least, as a share of these.
SLACK = 32


class SentMessage(NamedTuple):
    sequence: int
    payload: bytes


class _CachedBlock(NamedTuple):
    parent: ExternalHash | None
    token_ids: bytes  # packed
    extra_keys: ExtraKeys
    lora: Lora


class EventHistory:
    """Keeps at least `max_len` messages. A few more are forgotten together, so that replays share
    the content before them.
    """

    def __init__(self, facts: CacheFacts, max_len: int) -> None:
        self._facts = facts
        self._max_len = max_len
        self._max_kept = max_len + max_len // SLACK
        self._recent: deque[SentMessage] = deque()
        # After the last message that was forgotten.
        self._blocks: dict[ExternalHash, _CachedBlock] = {}
        self._time_s = 0.0
        self._encoded_content: bytes | None = None

    @property
    def end(self) -> int:
        """Sequence number after that of the last message."""
        return self._recent[-1].sequence + 1 if self._recent else 0

    def append(self, sequence: int, payload: bytes) -> None:
        self._recent.append(SentMessage(sequence, payload))
        if len(self._recent) > self._max_kept:
            self._encoded_content = None
            while len(self._recent) > self._max_len:
                self._forget(self._recent.popleft())

    def first_from(self, sequence: int) -> SentMessage | None:
        """Return the oldest message with this number or a later one."""
        place = bisect_left(self._recent, sequence, key=attrgetter("sequence"))
        return self._recent[place] if place < len(self._recent) else None

    def since(self, sequence: int) -> Iterator[SentMessage]:
        """Yield the messages from `sequence` on, up to the last one at the first call.

        If some are forgotten, also meanwhile, the next message replaces all before the oldest one:
        it clears the subscriber's view and names all blocks that were cached then.
        """
        end = self.end
        while sequence < end:
            oldest = self._recent[0].sequence
            message = self.first_from(sequence)
            if sequence < oldest or message is None:
                message = SentMessage(oldest - 1, self._content())
            yield message
            sequence = message.sequence + 1

    def _forget(self, message: SentMessage) -> None:
        batch = decode_batch(message.payload)
        self._time_s = batch.ts
        for event in batch.events:
            match event:
                case StoredMessage():
                    self._store(event)
                case RemovedMessage():
                    for name in event.block_hashes:
                        self._blocks.pop(name, None)
                case ClearedMessage():
                    self._blocks.clear()

    def _store(self, event: StoredMessage) -> None:
        parent, size = event.parent_block_hash, event.block_size
        keys = event.extra_keys or [None] * len(event.block_hashes)
        packed, lora = array("I", event.token_ids), Lora(event.lora_id, event.lora_name)
        for place, name in enumerate(event.block_hashes):
            tokens = packed[place * size : (place + 1) * size].tobytes()
            self._blocks[name] = _CachedBlock(parent, tokens, keys[place], lora)
            parent = name

    def _content(self) -> bytes:
        if self._encoded_content is None:
            self._encoded_content = encode_batch(self._blocks_as_batch())
        return self._encoded_content

    def _blocks_as_batch(self) -> MessageBatch:
        events: list[EventMessage] = [ClearedMessage()]
        last: StoredMessage | None = None
        for name, block in self._blocks.items():
            token_ids = array("I", block.token_ids).tolist()
            is_next = last is not None and block.parent == last.block_hashes[-1]
            if last is None or not is_next or block.lora != (last.lora_id, last.lora_name):
                last = self._facts.stored([], block.parent, [], [], block.lora)
                events.append(last)
            last.block_hashes.append(name)
            last.token_ids.extend(token_ids)
            if last.extra_keys is not None:
                last.extra_keys.append(block.extra_keys)
        return MessageBatch(self._time_s, events, 0)
