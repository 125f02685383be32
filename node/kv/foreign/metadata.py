"""Handshake of vLLM's NIXL connector: messages of its side channel, and what they say of its KV.

Nothing that a server sends is trusted. Its compatibility hash proves version, model, dtype and
shape; everything else is checked by the sizes. Pure.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, replace

import msgspec

from baton.core.errors import NamedError
from baton.core.foreign_kv import MAX_INT32
from baton.kv_transfer.layout import KvLayout, KvPacking
from baton.node.kv.foreign.config import ForeignSource

GET_METADATA = b"get_meta_msg"
CONNECTOR_VERSION = 14
MAX_REPLY_BYTES = 1 << 20
MAX_ADDRESS = (1 << 63) - 1
CPU_BACKEND = "CPU_ATTN"
BLOCK_LAYOUT = "LBHNC"  # layer, block, head, token, numbers
LAYER = re.compile(r"\.layers\.(\d{1,9})\.")
VEC_TOKENS = AMX_TOKENS = 16  # a block has a multiple
AMX_COLUMNS = 16
MAX_DEVICES = 1 << 10
DRAM = "DRAM"  # memory of the CPU
MAX_BLOCK_TOKENS = 1 << 16
# A node reads into staging memory for four blocks.
MAX_BLOCK_BYTES = 64 << 20


class SourceRefused(NamedError):
    """A foreign server's KV cannot be used by this node."""


@dataclass(frozen=True, slots=True)
class ForeignBlocks:
    """Blocks of one layer are in a region of their own, at equal distances."""

    engine_id: str
    agent_metadata: bytes
    layer_addresses: tuple[int, ...]
    layer_strides: tuple[int, ...]
    num_blocks: int
    layout: KvLayout
    device_id: int
    is_on_cpu: bool


class _Payload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


class _AgentMetadata(msgspec.Struct):
    """vLLM's NixlAgentMetadata, as far as it matters here."""

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: list[int]
    device_id: int
    num_blocks: int
    block_lens: list[int]
    block_strides: list[int]
    kv_cache_layout: str
    block_size: int
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int
    region_num_blocks: list[int] | None = None
    region_group_ids: list[int] | None = None
    region_names: list[str] | None = None
    region_mem_types: list[str] | None = None
    dcp_size: int = 1
    pcp_size: int = 1
    packed_member_layouts: dict[str, tuple[int, int]] = {}


def metadata_request() -> bytes:
    """Return the request for the metadata of a server's only rank."""
    return msgspec.msgpack.encode((GET_METADATA, 0, 0))


def read_reply(
    parts: list[bytes], source: ForeignSource, layout: KvLayout
) -> tuple[ForeignBlocks, float]:
    """Return the server's blocks and the time by its clock. Raises SourceRefused."""
    if len(parts) != 2 or sum(map(len, parts)) > MAX_REPLY_BYTES:
        raise SourceRefused(f"{source.address}: the side channel sent no handshake of vLLM's")
    try:
        payload = msgspec.msgpack.decode(parts[0], type=_Payload)
        clock_s = msgspec.msgpack.decode(parts[1], type=float)
    except (msgspec.DecodeError, ValueError) as error:
        raise SourceRefused(f"{source.address}: the handshake cannot be read: {error}") from None
    try:
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=_AgentMetadata)
    except (msgspec.DecodeError, ValueError) as error:
        raise SourceRefused(f"{source.address}: its metadata cannot be read: {error}") from None
    if not math.isfinite(clock_s):
        raise SourceRefused(f"{source.address}: its clock is at {clock_s}")
    _check_hash(payload.compatibility_hash, metadata.attn_backend_name, source, layout)
    return _blocks_of(metadata, source, layout), clock_s


def compatibility_hash(
    source: ForeignSource, layout: KvLayout, backend: str, *, is_hybrid: bool
) -> str:
    """Return vLLM's hash of a server that has this node's model and dtype."""
    factors = {
        "vllm_version": source.version,
        "nixl_connector_version": CONNECTOR_VERSION,
        "model": source.model,
        "dtype": f"torch.{layout.dtype}",
        "num_kv_heads": layout.num_kv_heads,
        "head_size": layout.head_dim,
        "num_hidden_layers": layout.num_layers,
        "attn_backend_name": backend,
        "cache_dtype": "auto",
        "is_hma_enabled": is_hybrid,
        "speculative_config": None,
        "transfer_mode": "pull",
    }
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


def _check_hash(given: str, backend: str, source: ForeignSource, layout: KvLayout) -> None:
    # A server's memory allocator does not change the blocks of these models.
    for is_hybrid in (True, False):
        if given == compatibility_hash(source, layout, backend, is_hybrid=is_hybrid):
            return
    raise SourceRefused(
        f"{source.address}: its compatibility hash is not that of vLLM {source.version} with "
        f"NixlConnector (pull), model {source.model!r} in {layout.dtype}, "
        f"{layout.num_layers} layers, {layout.num_kv_heads} KV heads of {layout.head_dim} and "
        "kv_cache_dtype auto; if only the model's path differs there, set ?model= in --kv-sources"
    )


def _blocks_of(metadata: _AgentMetadata, source: ForeignSource, layout: KvLayout) -> ForeignBlocks:
    theirs = replace(layout, block_size=metadata.block_size, packing=KvPacking.VLLM)
    problem = _find_problem(metadata, theirs)
    if problem:
        raise SourceRefused(f"{source.address}: {problem}")
    types = set(metadata.region_mem_types or [DRAM])
    return ForeignBlocks(
        engine_id=metadata.engine_id,
        agent_metadata=metadata.agent_metadata,
        layer_addresses=tuple(metadata.kv_caches_base_addr),
        layer_strides=tuple(metadata.block_strides),
        num_blocks=metadata.num_blocks,
        layout=replace(theirs, packing=_packing(metadata, source, theirs)),
        device_id=metadata.device_id,
        is_on_cpu=types == {DRAM},
    )


def _find_problem(metadata: _AgentMetadata, layout: KvLayout) -> str:
    """Return why blocks, which should have this layout, cannot be read; empty if they can."""
    size, num_layers = layout.block_size, layout.num_layers
    if not 1 <= size <= MAX_BLOCK_TOKENS or not 1 <= metadata.num_blocks <= MAX_INT32:
        return f"it has {metadata.num_blocks} blocks of {size} tokens"
    if metadata.kv_cache_layout != BLOCK_LAYOUT:
        return f"its KV layout is {metadata.kv_cache_layout!r}; {BLOCK_LAYOUT} is needed"
    if metadata.physical_blocks_per_logical_kv_block != 1:
        return "its kernels use smaller blocks than its scheduler"
    if metadata.dcp_size != 1 or metadata.pcp_size != 1 or metadata.packed_member_layouts:
        return "its KV is spread over ranks, or packed"
    lists = metadata.kv_caches_base_addr, metadata.block_strides, metadata.block_lens
    if any(len(each) != num_layers for each in lists):
        return f"it has {len(lists[0])} KV regions; this model has {num_layers} layers"
    layer_bytes = layout.layer_bytes
    if any(each != layer_bytes for each in metadata.block_lens):
        return f"its blocks have {metadata.block_lens} bytes a layer; {layer_bytes} are expected"
    if layout.block_bytes > MAX_BLOCK_BYTES:
        num_mib, max_mib = layout.block_bytes >> 20, MAX_BLOCK_BYTES >> 20
        return f"its blocks of {size} tokens have {num_mib} MiB; the limit is {max_mib} MiB"
    return _find_region_problem(metadata, layer_bytes)


def _find_region_problem(metadata: _AgentMetadata, layer_bytes: int) -> str:
    counts = metadata.region_num_blocks or [metadata.num_blocks]
    if any(count != metadata.num_blocks for count in counts):
        return "its KV regions differ in the number of blocks"
    if set(metadata.region_group_ids or [0]) != {0}:
        return "it has several KV groups"
    if not _are_layers(metadata.region_names or []):
        return f"its KV regions are not the layers in order: {metadata.region_names}"
    if len(set(metadata.region_mem_types or [DRAM])) != 1:
        return "its KV is in memory of several kinds"
    regions = zip(metadata.kv_caches_base_addr, metadata.block_strides, strict=True)
    for address, stride in regions:
        end = address + stride * metadata.num_blocks
        if address <= 0 or stride < layer_bytes or end > MAX_ADDRESS:
            return f"a KV region begins at {address} with blocks {stride} bytes apart"
    is_device = 0 <= metadata.device_id < MAX_DEVICES
    return "" if is_device else f"it is on device {metadata.device_id}"


def _are_layers(names: list[str]) -> bool:
    """Return whether regions are named after layers 0, 1, 2 and so on."""
    numbers = [LAYER.search(name) for name in names]
    return [found and int(found[1]) for found in numbers] == list(range(len(names)))


def _packing(metadata: _AgentMetadata, source: ForeignSource, layout: KvLayout) -> KvPacking:
    packing, is_cpu = source.packing, metadata.attn_backend_name == CPU_BACKEND
    if packing is None and is_cpu:
        raise SourceRefused(
            f"{source.address}: it runs on a CPU and does not say how it packs KV; set "
            "?packing=amx in --kv-sources if its CPU has AMX and computes in bfloat16, and "
            "otherwise ?packing=vec"
        )
    if packing is None or not is_cpu:
        if packing not in (None, KvPacking.VLLM):
            raise SourceRefused(f"{source.address}: it runs on no CPU, so its KV is plain")
        return KvPacking.VLLM
    if packing is KvPacking.VLLM:
        raise SourceRefused(f"{source.address}: it runs on a CPU, so its KV is packed")
    is_amx = packing is KvPacking.VLLM_AMX
    if metadata.block_size % (2 * AMX_TOKENS if is_amx else VEC_TOKENS):
        raise SourceRefused(
            f"{source.address}: blocks of {metadata.block_size} tokens are not packed"
        )
    if is_amx and (layout.dtype != "bfloat16" or layout.head_dim % AMX_COLUMNS):
        raise SourceRefused(f"{source.address}: AMX packs KV in bfloat16, in heads of 16 numbers")
    return packing
