"""Measured bandwidth of tiers below the KV cache: host memory, files and objects."""

from __future__ import annotations

import ctypes
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from baton.core.errors import InvalidConfig
from baton.doctor.findings import Finding, fail, ok, warn
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.calls import fastest_copies
from baton.kv_transfer.tiers.backing_tier import OBJECTS
from baton.kv_transfer.tiers.bandwidth import StoreRates, measure_host, measure_store
from baton.kv_transfer.tiers.kv_access import BlockMemory
from baton.kv_transfer.tiers.stores.file_store import FileStore
from baton.kv_transfer.tiers.stores.object_store import ObjectStore
from baton.kv_transfer.tiers.stores.objects import open_bucket

MEMORY_BYTES = 64 << 20
MAX_BLOCKS = 128
NUM_ROUNDS = 5
SLOW_BYTES_PER_S = 5e7
PROMPT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class KvShapeFacts:
    """Size of the KV that is loaded, and its model."""

    model: str
    block_bytes: int
    block_size: int  # tokens


TYPICAL = KvShapeFacts("Qwen3-0.6B", 1792 << 10, 16)


def check_tiers(folder: str, object_store: str, kv: KvShapeFacts = TYPICAL) -> Iterator[Finding]:
    """Measure host memory, and the folder and the bucket if they are given."""
    num_blocks = max(4, min(MAX_BLOCKS, MEMORY_BYTES // kv.block_bytes))
    owners = [huge_page_memory(num_blocks * kv.block_bytes) for _ in range(2)]
    starts = map(ctypes.addressof, map(ctypes.c_char.from_buffer, owners))
    memory, host = (BlockMemory(start, num_blocks, kv.block_bytes) for start in starts)
    memory.view(0)[:] = os.urandom(kv.block_bytes)
    yield _host(memory, host, kv)
    if folder:
        yield _folder(folder, memory, kv)
    if object_store:
        yield _bucket(object_store, memory, kv)


def _host(memory: BlockMemory, host: BlockMemory, kv: KvShapeFacts) -> Finding:
    copy = fastest_copies(kv.block_bytes)
    measure_host(memory, host, copy, perf_counter)  # maps the memory
    rounds = [measure_host(memory, host, copy, perf_counter, seed) for seed in range(NUM_ROUNDS)]
    load, store, memcpy = (
        median(each.num_bytes / seconds for each, seconds in zip(rounds, times, strict=True))
        for times in (
            [each.load_s for each in rounds],
            [each.store_s for each in rounds],
            [each.memcpy_s for each in rounds],
        )
    )
    found = f"loads {_rate(load)}, stores {_rate(store)} (memcpy {_rate(memcpy)})"
    return rate_finding("host tier", found, load, kv)


def _folder(folder: str, memory: BlockMemory, kv: KvShapeFacts) -> Finding:
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=Path(folder).expanduser()) as name:
            files = FileStore(name, "doctor", kv.block_bytes, 4 * MEMORY_BYTES + kv.block_bytes)
            rates = measure_store(files, memory, 1, perf_counter, lambda: _leave_page_cache(name))
    except (InvalidConfig, OSError) as error:
        return fail("file tier", str(error), "nodes write no KV there; choose another --kv-folder")
    return rate_finding("file tier", _describe(rates), rates.read_bytes_per_s, kv)


def _bucket(url: str, memory: BlockMemory, kv: KvShapeFacts) -> Finding:
    try:
        objects = open_bucket(f"{url.rstrip('/')}/doctor-{secrets.token_hex(4)}")
        limit = 4 * MEMORY_BYTES + kv.block_bytes
        store = ObjectStore(objects, "doctor", kv.block_bytes, limit)
        rates = measure_store(store, memory, OBJECTS.num_parallel, perf_counter)
    except (InvalidConfig, OSError) as error:
        advice = "nodes work without it; check the bucket, and AWS_* in the environment"
        return fail("object tier", str(error), advice)
    return rate_finding("object tier", _describe(rates), rates.read_bytes_per_s, kv)


def rate_finding(check: str, found: str, bytes_per_s: float, kv: KvShapeFacts) -> Finding:
    tokens_per_s = bytes_per_s / kv.block_bytes * kv.block_size
    meaning = (
        f"{tokens_per_s:,.0f} tokens/s of {kv.model}, a prompt of {PROMPT_TOKENS:,} tokens in "
        f"{PROMPT_TOKENS / tokens_per_s:.2g} s"
    )
    if bytes_per_s < SLOW_BYTES_PER_S:
        advice = "nodes load from it only what they would compute more slowly"
        return warn(check, f"{found}: {meaning}", advice)
    return ok(check, f"{found}: {meaning}")


def _describe(rates: StoreRates) -> str:
    return f"reads {_rate(rates.read_bytes_per_s)}, writes {_rate(rates.write_bytes_per_s)}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2g} GB/s"


def _leave_page_cache(folder: str) -> None:
    """Write files to the disk and drop them from memory, so that they are read from the disk."""
    for path in Path(folder).rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
