"""Follow the KV events of a node, of Baton or vLLM, and keep the set of its cached blocks.

    python -m tools.follow_kv_events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558

prints a line for each message; --once prints the cached blocks as JSON after a replay, and ends.
The file needs only pyzmq and msgspec, so that it also runs by itself where Baton is not installed.
With --vllm, messages are decoded with vLLM's own structs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import zmq

SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
REPLAY_TIMEOUT_MS = 10_000


class CachedBlock(NamedTuple):
    """A block of a node's prefix cache."""

    parent: int | bytes | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[Any, ...] | None
    lora_name: str | None = None


class KvMessage(NamedTuple):
    """One message: a sequence number, and events as maps."""

    sequence: int
    events: list[dict[str, Any]]


DecodeEvents = Callable[[bytes], list[dict[str, Any]]]


def decode_maps(payload: bytes) -> list[dict[str, Any]]:
    """Return the events of a message, without structs."""
    _, events, *_ = msgspec.msgpack.decode(payload)
    return list(events)


def vllm_decoder() -> DecodeEvents:
    """Return a function that decodes with vLLM's structs and checks the types of all fields."""
    from vllm.distributed.kv_events import KVEventBatch

    decode = msgspec.msgpack.Decoder(KVEventBatch).decode

    def decode_structs(payload: bytes) -> list[dict[str, Any]]:
        events = decode(payload).events
        return [{"type": type(each).__name__, **msgspec.structs.asdict(each)} for each in events]

    return decode_structs


@dataclass(slots=True)
class CacheView:
    """The cached blocks of a node, as its events name them. Pure."""

    blocks: dict[int | bytes, CachedBlock] = field(default_factory=dict)
    num_stored: int = 0
    num_removed: int = 0
    num_cleared: int = 0

    def apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                for name in event["block_hashes"]:
                    self.blocks.pop(name, None)
                    self.num_removed += 1
            case "AllBlocksCleared":
                self.blocks.clear()
                self.num_cleared += 1

    def _store(self, event: dict[str, Any]) -> None:
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        extra_keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for place, name in enumerate(event["block_hashes"]):
            own = tuple(tokens[place * size : (place + 1) * size])
            keys = extra_keys[place]
            known_keys = None if keys is None else tuple(keys)
            self.blocks[name] = CachedBlock(parent, own, known_keys, event.get("lora_name"))
            self.num_stored += 1
            parent = name


class KvEventFollower:
    """Subscriber that asks for a replay of what it has missed."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        decode: DecodeEvents = decode_maps,
    ) -> None:
        self.view = CacheView()
        self.next_sequence = 0
        self.num_replays = 0
        self.num_skipped = 0  # sequence numbers that no replay had
        self._decode = decode
        self._context = zmq.Context()
        self._subscription = self._context.socket(zmq.SUB)
        self._subscription.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._subscription.connect(endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        if replay_endpoint:
            self._replay = self._context.socket(zmq.DEALER)
            self._replay.setsockopt(zmq.RCVHWM, 0)
            self._replay.connect(replay_endpoint)

    def __enter__(self) -> KvEventFollower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def receive(self, timeout_ms: int | None = None) -> list[KvMessage]:
        """Wait for a message. Returns it after those that were missed before it."""
        if not self._subscription.poll(timeout_ms):
            return []
        _, packed, payload = self._subscription.recv_multipart()
        sequence = int.from_bytes(packed, "big")
        if sequence < self.next_sequence - 1:  # the node has restarted
            self.view.blocks.clear()
            self.next_sequence = 0
        applied = self.catch_up() if sequence > self.next_sequence else []
        if sequence >= self.next_sequence:
            applied.append(self._apply(sequence, payload))
        return applied

    def catch_up(self) -> list[KvMessage]:
        """Request all messages from the next sequence number on, and apply them."""
        if self._replay is None:
            return []
        self.num_replays += 1
        wanted = self.next_sequence.to_bytes(SEQUENCE_BYTES, "big")
        self._replay.send_multipart([b"", wanted])
        return [self._apply(*message) for message in self._replayed(self._replay)]

    def _replayed(self, replay: zmq.Socket[bytes]) -> Iterator[tuple[int, bytes]]:
        while replay.poll(REPLAY_TIMEOUT_MS):
            _, _, packed, payload = replay.recv_multipart()
            if packed == END_OF_REPLAY:
                return
            yield int.from_bytes(packed, "big"), payload
        raise TimeoutError("the node did not answer a request for a replay")

    def _apply(self, sequence: int, payload: bytes) -> KvMessage:
        self.num_skipped += sequence - self.next_sequence
        self.next_sequence = sequence + 1
        message = KvMessage(sequence, self._decode(payload))
        for event in message.events:
            self.view.apply(event)
        return message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("endpoint", help="PUB endpoint of the node, such as tcp://host:5557")
    parser.add_argument("--replay", default="", help="ROUTER endpoint of the node")
    parser.add_argument("--topic", default="")
    parser.add_argument("--once", action="store_true", help="print the blocks as JSON, and end")
    parser.add_argument("--vllm", action="store_true", help="decode with vLLM's structs")
    given = parser.parse_args()
    decode = vllm_decoder() if given.vllm else decode_maps
    with KvEventFollower(given.endpoint, given.replay, given.topic, decode) as follower:
        messages = follower.catch_up()
        if given.once:
            print(_as_json(follower))
            return
        while True:
            for message in messages:
                kinds = " ".join(event["type"] for event in message.events)
                print(f"{message.sequence}: {kinds}; {len(follower.view.blocks)} blocks cached")
            messages = follower.receive()


def _as_json(follower: KvEventFollower) -> str:
    blocks = {
        _as_text(name): {
            "parent": None if block.parent is None else _as_text(block.parent),
            "token_ids": block.token_ids,
            "extra_keys": block.extra_keys,
        }
        for name, block in follower.view.blocks.items()
    }
    return json.dumps({"next_sequence": follower.next_sequence, "blocks": blocks})


def _as_text(name: int | bytes) -> str:
    return str(name) if isinstance(name, int) else name.hex()


if __name__ == "__main__":
    main()
