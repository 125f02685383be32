"""Messages for replay: the last ones, and before them the cache's content as one message. Pure.

vLLM forgets what a message said when it leaves the buffer. Here a subscriber can join at any time:
what the forgotten messages said is kept as the blocks that were cached after them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from node.kv_events.messages import (
    CacheFacts,
    ClearedMessage,
    EventMessage,
    ExtraKeys,
    MessageBatch,
    RemovedMessage,
    StoredMessage,
    decode_batch,
    encode_batch,
)


class SentMessage(NamedTuple):
    sequence: int
    payload: bytes


class _Block(NamedTuple):
    parent: bytes | None
    token_ids: bytes  # packed
    extra_keys: ExtraKeys


class EventHistory:
    def __init__(self, facts: CacheFacts, max_len: int) -> None:
        self._facts = facts
        self._max_len = max_len
        self._recent: deque[SentMessage] = deque()
        # After the last message that was forgotten.
        self._blocks: dict[bytes, _Block] = {}
        self._time_s = 0.0

    def append(self, sequence: int, payload: bytes) -> None:
        self._recent.append(SentMessage(sequence, payload))
        if len(self._recent) > self._max_len:
            self._forget(self._recent.popleft())

    def since(self, sequence: int) -> Iterator[SentMessage]:
        """Yield the messages from `sequence` on.

        If some are forgotten, the first message replaces all before the oldest one: it clears the
        subscriber's view and names all blocks that were cached then.
        """
        if not self._recent:
            return
        oldest = self._recent[0].sequence
        if sequence < oldest:
            yield SentMessage(oldest - 1, encode_batch(self._content()))
        newest_first = takewhile(lambda each: each.sequence >= sequence, reversed(self._recent))
        yield from reversed(list(newest_first))

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
        packed = array("I", event.token_ids)
        for place, name in enumerate(event.block_hashes):
            tokens = packed[place * size : (place + 1) * size].tobytes()
            self._blocks[name] = _Block(parent, tokens, keys[place])
            parent = name

    def _content(self) -> MessageBatch:
        events: list[EventMessage] = [ClearedMessage()]
        last: StoredMessage | None = None
        for name, block in self._blocks.items():
            token_ids = array("I", block.token_ids).tolist()
            if last is None or block.parent != last.block_hashes[-1]:
                last = self._facts.stored([], block.parent, [], [])
                events.append(last)
            last.block_hashes.append(name)
            last.token_ids.extend(token_ids)
            if last.extra_keys is not None:
                last.extra_keys.append(block.extra_keys)
        return MessageBatch(self._time_s, events, 0)
