"""KV events on the wire: vLLM's maps, and what they say about salts and kinds of KV."""

from __future__ import annotations

import msgspec
import pytest

from baton.core.ids import AdapterRef
from baton.core.media import PictureInBlock
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.groups import CacheLayout, KvCacheSpec, KvGroup
from baton.node.kv.events.messages import (
    CacheFacts,
    HashFormat,
    StoredMessage,
    decode_batch,
    encode_batch,
    spec_kind_of,
)

ONE, TWO, THREE = (BlockHash(bytes([number]) * 16) for number in (1, 2, 3))
UNSALTED, SALTED, ADAPTED = (BlockHash(letter * 16) for letter in (b"u", b"s", b"a"))
FACTS = CacheFacts(2, lambda _: UNSALTED, "sliding_window", 128, HashFormat.BYTES)
SALT_KEY = "dynamo-cache-salt:" + SALTED.hex()


def test_hashes_are_the_low_64_bits_by_default() -> None:
    facts = CacheFacts(2, lambda _: UNSALTED, "full_attention")
    name, parent = (
        BlockHash(bytes(8) + b"\xff" * 7 + b"\x01"),
        BlockHash(b"p" * 8 + bytes(7) + b"\2"),
    )
    events = BlockStored((name,), parent, (5, 6), 2, UNSALTED), BlockRemoved((parent, name))

    _, (stored, removed), _ = msgspec.msgpack.decode(encode_batch(facts.to_batch(events, 0.0)))

    assert stored["block_hashes"] == [(1 << 64) - 255]
    assert stored["parent_block_hash"] == 2
    assert removed["block_hashes"] == [2, (1 << 64) - 255]


def test_a_batch_is_an_array_of_tagged_maps_with_the_fields_of_vllm() -> None:
    events = (
        BlockStored((ONE, TWO), None, (5, 6, 7, 8), 2, UNSALTED),
        BlockRemoved((ONE,)),
        AllBlocksCleared(),
    )

    payload = encode_batch(FACTS.to_batch(events, 12.5))

    assert msgspec.msgpack.decode(payload) == [
        12.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [ONE, TWO],
                "parent_block_hash": None,
                "token_ids": [5, 6, 7, 8],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None, None],
                "group_idx": 0,
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": 128,
            },
            {"type": "BlockRemoved", "block_hashes": [ONE], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_only_the_first_block_of_a_salted_sequence_has_a_key() -> None:
    first = BlockStored((ONE, TWO), None, (5, 6, 7, 8), 2, SALTED)
    later = BlockStored((THREE,), TWO, (9, 9), 2, SALTED)

    batch = FACTS.to_batch((first, later), 0.0)

    keys = [getattr(message, "extra_keys", None) for message in batch.events]
    assert keys == [[(SALT_KEY,), None], [None]]


def test_blocks_of_an_adapter_have_its_number_and_name() -> None:
    adapter = AdapterRef("sql", "0" * 14 + "7" + "f" * 17)
    roots = {adapter.id: ADAPTED, "": UNSALTED}
    facts = CacheFacts(2, roots.__getitem__, "full_attention")
    unsalted = BlockStored((ONE, TWO), None, (5, 6, 7, 8), 2, ADAPTED, adapter)
    salted = BlockStored((THREE,), None, (9, 9), 2, SALTED, adapter)

    first, second = facts.to_batch((unsalted, salted), 0.0).events

    assert isinstance(first, StoredMessage)
    assert isinstance(second, StoredMessage)
    assert (first.lora_id, first.lora_name) == (second.lora_id, second.lora_name) == (7, "sql")
    assert first.extra_keys == [("sql",), ("sql",)]
    assert second.extra_keys == [("sql", SALT_KEY)]


def test_blocks_name_the_pictures_that_they_have_tokens_of() -> None:
    fox, owl = bytes(32), b"o" * 32
    pictures = (), (PictureInBlock(fox, 1),), (PictureInBlock(fox, -1), PictureInBlock(owl, 1))
    adapter = AdapterRef("sql", "f" * 32)
    tokens = (5, 6, 7, 8, 9, 9)
    events = (
        BlockStored((ONE, TWO, THREE), ONE, tokens, 2, UNSALTED, pictures=pictures),
        BlockStored((ONE,), None, (9, 9), 2, SALTED, adapter, pictures=pictures[1:2]),
    )

    payload = encode_batch(FACTS.to_batch(events, 0.0))

    _, (stored, salted), _ = msgspec.msgpack.decode(payload)
    own = ["mm", "00" * 32, 1]
    assert stored["extra_keys"] == [
        None,
        [own],
        [["mm", "00" * 32, -1], ["mm", owl.hex(), 1]],
    ]
    assert salted["extra_keys"] == [["sql", own, SALT_KEY]]
    assert encode_batch(decode_batch(payload)) == payload


@pytest.mark.parametrize(
    ("spec", "is_latent", "is_recurrent", "kind"),
    [
        (KvCacheSpec(), False, False, "full_attention"),
        (KvCacheSpec(), True, False, "mla_attention"),
        (KvCacheSpec(window=8), False, False, "sliding_window"),
        (KvCacheSpec(window=8), True, False, "sliding_window_mla"),
        (KvCacheSpec(chunk=8), False, False, "chunked_local_attention"),
        (KvCacheSpec(), False, True, "mamba"),
    ],
)
def test_kv_cache_kinds_have_vllm_names(
    spec: KvCacheSpec, is_latent: bool, is_recurrent: bool, kind: str
) -> None:
    layout = CacheLayout((KvGroup(spec),), num_state_blocks=int(is_recurrent))
    assert spec_kind_of(layout, is_latent=is_latent) == kind
