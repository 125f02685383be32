"""Handshakes of vLLM servers: one that vLLM 0.32.0 sent, and changed ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from baton.kv_transfer.layout import KvLayout, KvPacking
from baton.node.kv.foreign.config import ForeignSource
from baton.node.kv.foreign.metadata import (
    ForeignBlocks,
    SourceRefused,
    compatibility_hash,
    read_reply,
)
from tests.support.fake_vllm import recorded_reply

DEMO = KvLayout("bfloat16", 16, num_layers=4, num_kv_heads=2, head_dim=64)
SOURCE = ForeignSource("localhost", 5600, "models/demo", KvPacking.VLLM_VEC)


def read(
    parts: list[bytes], source: ForeignSource = SOURCE, layout: KvLayout = DEMO
) -> ForeignBlocks:
    return read_reply(parts, source, layout)[0]


def changed_reply(**changes: Any) -> list[bytes]:
    """Return the recorded handshake with other metadata, and a hash that fits its back end."""
    payload, clock = recorded_reply()
    fields = msgspec.msgpack.decode(payload)
    metadata = msgspec.msgpack.decode(fields["agent_metadata_bytes"]) | changes
    backend = metadata["attn_backend_name"]
    digest = compatibility_hash(SOURCE, DEMO, backend, is_hybrid=False)
    encoded = msgspec.msgpack.encode(metadata)
    reply = {"compatibility_hash": digest, "agent_metadata_bytes": encoded}
    return [msgspec.msgpack.encode(reply), clock]


def test_a_handshake_of_vllm_is_read() -> None:
    blocks, clock_s = read_reply(recorded_reply(), SOURCE, DEMO)
    assert clock_s == 1999.25
    assert blocks.layout.block_size == 128
    assert blocks.layout.layer_bytes == 2 * 2 * 128 * 64 * 2
    assert len(blocks.layer_addresses) == 4
    assert blocks.layout.packing is KvPacking.VLLM_VEC
    assert blocks.is_on_cpu


@pytest.mark.parametrize(
    "layout",
    [
        replace(DEMO, dtype="float16"),
        replace(DEMO, num_kv_heads=4, head_dim=32),
        replace(DEMO, num_layers=5),
    ],
)
def test_other_models_are_refused(layout: KvLayout) -> None:
    with pytest.raises(SourceRefused, match="compatibility hash"):
        read(recorded_reply(), layout=layout)


def test_a_model_of_another_name_is_refused() -> None:
    with pytest.raises(SourceRefused, match="compatibility hash"):
        read(recorded_reply(), replace(SOURCE, model="models/other"))


def test_other_versions_are_refused() -> None:
    with pytest.raises(SourceRefused, match=r"vLLM 0\.33\.0"):
        read(recorded_reply(), replace(SOURCE, version="0.33.0"))


CHANGES: dict[str, dict[str, Any]] = {
    "KV layout": {"kv_cache_layout": "LBNHC"},
    "smaller blocks": {"physical_blocks_per_logical_kv_block": 2},
    "spread over ranks": {"dcp_size": 2},
    "or packed": {"packed_member_layouts": {"a": (0, 1)}},
    "has 1 KV regions": {
        "kv_caches_base_addr": [4096],
        "block_lens": [65536],
        "block_strides": [65536],
    },
    "bytes a layer": {"block_lens": [65536] * 3 + [65535]},
    "of 0 tokens": {"block_size": 0},
    "of 1099511627776 tokens": {"block_size": 1 << 40},
    "has 0 blocks": {"num_blocks": 0},
    "number of blocks": {"region_num_blocks": [4096] * 3 + [1]},
    "several KV groups": {"region_group_ids": [0, 1, 0, 1]},
    "several kinds": {"region_mem_types": ["DRAM", "VRAM", "DRAM", "DRAM"]},
    "begins at 0 ": {"kv_caches_base_addr": [0, 4096, 4096, 4096]},
    "begins at 9223372036854775807": {"kv_caches_base_addr": [(1 << 63) - 1] * 4},
    "blocks 1 bytes apart": {"block_strides": [1] * 4},
    "layers in order": {"region_names": [f"model.layers.{i}.self_attn.attn" for i in (1, 0, 2, 3)]},
    "device -1": {"device_id": -1},
    "cannot be read": {"num_blocks": "4096"},
    "runs on no CPU": {"attn_backend_name": "FLASH_ATTN"},
    "of 24 tokens": {
        "block_size": 24,
        "block_lens": [24 * 512] * 4,
        "block_strides": [24 * 512] * 4,
    },
}


@pytest.mark.parametrize(("reason", "changes"), CHANGES.items(), ids=CHANGES)
def test_kv_that_does_not_fit_is_refused(reason: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SourceRefused, match=reason):
        read(changed_reply(**changes))


def test_the_unchanged_metadata_pass() -> None:
    assert read(changed_reply()) == read(recorded_reply())


@pytest.mark.parametrize("packing", [None, KvPacking.VLLM])
def test_the_packing_of_a_cpu_is_never_guessed(packing: KvPacking | None) -> None:
    with pytest.raises(SourceRefused, match=r"packing=amx|is packed"):
        read(recorded_reply(), replace(SOURCE, packing=packing))


def test_servers_on_gpus_are_plain() -> None:
    reply = changed_reply(attn_backend_name="FLASH_ATTN", region_mem_types=["VRAM"] * 4)
    blocks = read(reply, replace(SOURCE, packing=None))
    assert blocks.layout.packing is KvPacking.VLLM
    assert not blocks.is_on_cpu


HOSTILE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "no part": lambda _: [],
    "empty": lambda _: [b"", b""],
    "one part": lambda parts: parts[:1],
    "three parts": lambda parts: [*parts, b"more"],
    "garbage": lambda parts: [os.urandom(1000), parts[1]],
    "cut": lambda parts: [parts[0][:-1], parts[1]],
    "no clock": lambda parts: [parts[0], b"\xc0"],
    "clock that is no number": lambda parts: [parts[0], msgspec.msgpack.encode(float("nan"))],
    "deep nesting": lambda parts: [b"\x91" * 100_000, parts[1]],
    "large": lambda parts: [parts[0], b"\xc4" + bytes(2 << 20)],
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_handshakes_are_refused(change: Callable[[list[bytes]], list[bytes]]) -> None:
    with pytest.raises(SourceRefused):
        read(change(recorded_reply()))


def test_blocks_that_need_gigabytes_of_staging_memory_are_refused() -> None:
    layer_bytes = 2 * 2 * 65_536 * 64 * 2
    huge = changed_reply(block_size=65_536, block_lens=[layer_bytes] * 4)

    with pytest.raises(SourceRefused, match="blocks of 65536 tokens have 128 MiB; the limit is"):
        read(huge)
