"""Messages of KV events on the wire, in vLLM's format (as of vLLM 0.32). Pure.

A message is a msgpack array of time, events and data-parallel rank; an event is a map whose key
`type` names its kind. Fields that have their default value are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from msgspec import Struct, msgpack

from baton.core.ids import AdapterRef
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.groups import CacheLayout

MEDIUM = "GPU"  # vLLM's name of the KV cache itself, also where that is on a CPU
FIRST_GROUP = 0
LORA_ID_DIGITS = 15  # hexadecimal, so that a signed integer of 64 bits can hold it
# Key of a salt, as Dynamo writes and reads it; others compare keys as a whole.
SALT_KEY_PREFIX = "dynamo-cache-salt:"
INT_HASH_BYTES = 8
PICTURE = "mm"  # kind of a key that names a picture
# Of one block: names and salts, and for a picture its kind, digest and offset in the block.
ExtraKeys = tuple[str | tuple[str, str, int], ...] | None
ExternalHash = int | bytes  # hash of a block on the wire


class HashFormat(Enum):
    """Form of block hashes on the wire."""

    INT = "int"  # low 64 bits, unsigned: vLLM's default
    BYTES = "bytes"  # the whole name

    def encode(self, name: BlockHash) -> ExternalHash:
        if self is HashFormat.BYTES:
            return name
        return int.from_bytes(name[-INT_HASH_BYTES:], "big")


class Lora(NamedTuple):
    """LoRA adapter of blocks."""

    id: int | None
    name: str | None


NO_LORA = Lora(None, None)


class StoredMessage(Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedMessage(Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[ExternalHash]
    medium: str | None
    group_idx: int | None = None


class ClearedMessage(Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    pass


EventMessage = StoredMessage | RemovedMessage | ClearedMessage


class MessageBatch(Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[EventMessage]
    data_parallel_rank: int | None = None


encode_batch = msgpack.Encoder().encode
decode_batch = msgpack.Decoder(MessageBatch).decode


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Facts about a node's prefix cache that its events contain."""

    block_size: int
    # By the id of the adapter, or without one: parent of the first blocks of unsalted requests.
    unsalted_root: Callable[[str], BlockHash]
    spec_kind: str
    sliding_window: int | None = None
    hash_format: HashFormat = HashFormat.INT

    def to_batch(self, events: Iterable[KvEvent], time_s: float) -> MessageBatch:
        return MessageBatch(time_s, [self._to_message(event) for event in events], 0)

    def stored(
        self,
        names: list[ExternalHash],
        parent: ExternalHash | None,
        token_ids: list[int],
        extra_keys: list[ExtraKeys],
        lora: Lora = NO_LORA,
    ) -> StoredMessage:
        return StoredMessage(
            block_hashes=names,
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=self.block_size,
            lora_id=lora.id,
            medium=MEDIUM,
            lora_name=lora.name,
            extra_keys=extra_keys,
            group_idx=FIRST_GROUP,
            kv_cache_spec_kind=self.spec_kind,
            kv_cache_spec_sliding_window=self.sliding_window,
        )

    def _to_message(self, event: KvEvent) -> EventMessage:
        encode = self.hash_format.encode
        match event:
            case BlockStored():
                parent = event.parent_block_hash
                return self.stored(
                    list(map(encode, event.block_hashes)),
                    None if parent is None else encode(parent),
                    list(event.token_ids),
                    self._extra_keys(event),
                    _lora_of(event.adapter),
                )
            case BlockRemoved():
                return RemovedMessage(list(map(encode, event.block_hashes)), MEDIUM, FIRST_GROUP)
            case AllBlocksCleared():
                return ClearedMessage()

    def _extra_keys(self, event: BlockStored) -> list[ExtraKeys]:
        """Return the extra keys of each block, as vLLM does.

        They are the name of its adapter, its pictures, and, for the first block of a sequence with
        a salt, the digest of the salt. The salt itself is a secret of its clients.
        """
        adapter = event.adapter
        own = (adapter.name,) if adapter.id else ()
        keys: list[ExtraKeys] = [own or None] * len(event.block_hashes)
        for place, pictures in enumerate(event.pictures):
            named = ((PICTURE, each.digest.hex(), each.offset) for each in pictures)
            keys[place] = (*own, *named) or None
        root = event.root_hash
        is_first = event.parent_block_hash is None
        if is_first and root is not None and root != self.unsalted_root(adapter.id):
            keys[0] = (*(keys[0] or ()), SALT_KEY_PREFIX + root.hex())
        return keys


def _lora_of(adapter: AdapterRef) -> Lora:
    """Return the adapter of blocks. vLLM numbers adapters; here the number is part of the id."""
    if not adapter.id:
        return NO_LORA
    return Lora(int(adapter.id[:LORA_ID_DIGITS], 16), adapter.name)


def spec_kind_of(layout: CacheLayout, *, is_latent: bool) -> str:
    """Return vLLM's name of the kind of KV that the events are about.

    With recurrent layers, they name the blocks at whose ends a state is cached.
    """
    if layout.has_state:
        return "mamba"
    spec = layout.groups[0].spec
    if spec.chunk is not None:
        return "chunked_local_attention"
    kind = "full_attention" if spec.window is None else "sliding_window"
    latent = {"full_attention": "mla_attention", "sliding_window": "sliding_window_mla"}
    return latent[kind] if is_latent else kind
