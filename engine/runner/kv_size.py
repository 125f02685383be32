"""Number of blocks of the KV cache, from the settings and the memory of the device."""

from __future__ import annotations

import logging
from collections.abc import Callable

from baton.core.units import format_bytes
from baton.engine.plan import Runner
from baton.engine.runner.attention.kv_tensor import num_blocks_within
from baton.engine.runner.config import RunnerConfig, check
from baton.engine.runner.device.device import Device, MemoryProfile
from baton.engine.runner.device.memory_profile import largest_plans, num_blocks_of, profile_steps
from baton.engine.runner.kv_budget import CacheShape, auto_kv_bytes, profiled_kv_bytes
from baton.engine.runner.model_runner import TorchRunner

log = logging.getLogger(__name__)


def choose_num_blocks(
    config: RunnerConfig,
    cache: CacheShape,
    device: Device,
    make_runner: Callable[[int], TorchRunner] | None = None,
    capture: Callable[[TorchRunner], None] = lambda _: None,
) -> int:
    """Return the number of blocks, once the weights are loaded. Raises InvalidConfig.

    `make_runner` makes a runner with so many blocks, with which the largest steps are measured,
    and the graphs of decode steps that `capture` captures. None: steps are not measured.
    """
    kv_bytes = config.kv_cache_bytes
    if kv_bytes is not None:
        _check_room(kv_bytes, cache, device)
        return num_blocks_in(kv_bytes, cache, device)
    if config.kv_cache_share is not None:
        free_bytes = max(0, device.free_bytes() - cache.adapter_bytes)
        kv_bytes = int(free_bytes * config.kv_cache_share)
    elif (
        make_runner is not None
        and (memory := _measure(config, cache, device, make_runner, capture)) is not None
    ):
        kv_bytes = profiled_kv_bytes(config, memory, cache)
        sizes = (
            memory.total_bytes,
            memory.own_bytes,
            cache.adapter_bytes,
            memory.run_bytes,
            kv_bytes,
        )
        text = "%s of %s: weights %s, adapters %s, largest step and graphs %s, KV cache %s"
        log.info(text, device.torch_device, *map(format_bytes, sizes))
    else:
        kv_bytes = auto_kv_bytes(config, device.free_bytes(), cache)
    _check_room(kv_bytes, cache, device)
    return num_blocks_within(kv_bytes, cache.layout, cache.block_bytes)


def _check_room(kv_bytes: int, cache: CacheShape, device: Device) -> None:
    """Log the memory that adapters can take, and warn if the KV cache does not leave it free."""
    if not cache.adapter_bytes:
        return
    free_bytes = device.free_bytes()
    text = "LoRA adapters take up to %s and the KV cache %s of the %s that are free"
    sizes = map(format_bytes, (cache.adapter_bytes, kv_bytes, free_bytes))
    if cache.adapter_bytes + kv_bytes <= free_bytes:
        log.info(text, *sizes)
    else:
        remedy = ": lower --kv-cache-memory, max-cpu-loras or max-lora-rank"
        log.warning(text + remedy, *sizes)


def num_blocks_in(kv_bytes: int, cache: CacheShape, device: Device) -> int:
    """Return the number of blocks of a given size. Raises InvalidConfig if it is not free."""
    free = device.free_bytes()
    check(kv_bytes <= free, f"kv_cache_bytes {kv_bytes}: at most the {free} bytes that are free")
    return num_blocks_within(kv_bytes, cache.layout, cache.block_bytes)


def _measure(
    config: RunnerConfig,
    cache: CacheShape,
    device: Device,
    make_runner: Callable[[int], TorchRunner],
    capture: Callable[[TorchRunner], None],
) -> MemoryProfile | None:
    limits = config.max_num_batched_tokens, config.max_num_seqs, cache.max_model_len
    plans = largest_plans(*limits, config.block_size, cache.layout)
    num_blocks = num_blocks_of(plans[0])

    def use_runner(run: Callable[[Runner], None]) -> None:
        with make_runner(num_blocks) as runner:
            # Steps run next to the memory of the graphs.
            capture(runner)
            run(runner)

    memory = profile_steps(device, plans, use_runner)
    if memory is None:
        return None
    return memory._replace(run_bytes=memory.run_bytes - num_blocks * cache.block_bytes)
