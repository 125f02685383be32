"""Measured bandwidth of tiers below the KV cache: host memory, files and objects."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from baton.core.errors import InvalidConfig
from baton.doctor.findings import Finding, fail, ok, warn
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.calls import fastest_copies
from baton.kv_transfer.tiers.bandwidth import StoreRates, measure_host, measure_store
from baton.kv_transfer.tiers.kv_access import BlockMemory
from baton.kv_transfer.tiers.stores.block_store import StoreKind
from baton.kv_transfer.tiers.stores.store_kinds import STORE_KINDS

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


def check_tiers(places: Mapping[str, str], kv: KvShapeFacts = TYPICAL) -> Iterator[Finding]:
    """Measure host memory, and the stores that `places` has by the names of their tiers."""
    num_blocks = max(4, min(MAX_BLOCKS, MEMORY_BYTES // kv.block_bytes))
    owners = [huge_page_memory(num_blocks * kv.block_bytes) for _ in range(2)]
    starts = map(ctypes.addressof, map(ctypes.c_char.from_buffer, owners))
    memory, host = (BlockMemory(start, num_blocks, kv.block_bytes) for start in starts)
    memory.view(0)[:] = os.urandom(kv.block_bytes)
    yield _host(memory, host, kv)
    for kind in STORE_KINDS:
        if places.get(kind.name):
            yield _store(kind, places[kind.name], memory, kv)


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


def _store(kind: StoreKind, place: str, memory: BlockMemory, kv: KvShapeFacts) -> Finding:
    check, max_bytes = f"{kind.name} tier", 4 * MEMORY_BYTES + kv.block_bytes
    empty = f"{place.rstrip('/')}/doctor-{secrets.token_hex(4)}"
    folder = Path(empty).expanduser()  # unless it is a URL
    try:
        store = kind.open(empty, "doctor", kv.block_bytes, max_bytes, 1.0)
        between = partial(_leave_page_cache, folder)
        rates = measure_store(store, memory, kind.num_parallel, perf_counter, between)
    except (InvalidConfig, OSError) as error:
        return fail(check, str(error), kind.remedy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rate_finding(check, _describe(rates), rates.read_bytes_per_s, kv)


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


def _leave_page_cache(folder: Path) -> None:
    """Write files to the disk and drop them from memory, so that they are read from the disk."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
