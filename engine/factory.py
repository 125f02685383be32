"""Factory functions that build an engine around a loaded runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.core.media import StoredRows
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.kv_arrival.arrivals import NO_SOURCES, KvSources
from baton.engine.kv_cache.groups import NO_MEMORY, CacheConfig
from baton.engine.plan import StepObserver
from baton.engine.runner.loaded_runner import LoadedRunner
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.structured_output.llguidance_backend import GrammarLibrary
from baton.kv_transfer.driver import KvDriver


def build_engine(
    runner: LoadedRunner,
    options: EngineOptions,
    drivers: Sequence[KvDriver] = (),
    observers: Sequence[StepObserver] = (),
) -> EngineCore:
    """Build an engine. Without drivers, KV neither leaves nor reaches its cache."""
    scheduler = build_scheduler(runner, options)
    return EngineCore(scheduler, runner, drivers, observers=observers)


def build_scheduler(
    runner: LoadedRunner,
    options: EngineOptions,
    sources: KvSources = NO_SOURCES,
) -> Scheduler:
    """Build a scheduler for the runner's model, for callers that wire up the engine themselves."""
    return Scheduler(
        _scheduling_for(runner, options.scheduling), cache_config_for(runner, options), sources
    )


def build_grammars(runner: LoadedRunner) -> GrammarLibrary:
    """Build the grammar library for the runner's model."""
    info = runner.info
    return GrammarLibrary(info.checkpoint, info.vocab_size, info.eos_token_ids)


def cache_config_for(runner: LoadedRunner, options: EngineOptions) -> CacheConfig:
    """Return the settings of the KV cache for the runner's model."""
    memory = runner.kv_memory
    if memory is None:
        return CacheConfig(num_blocks=0, layout=NO_MEMORY, enable_prefix_caching=False)
    return CacheConfig(
        num_blocks=memory.num_blocks,
        block_size=memory.blocks.block_size,
        layout=memory.layout,
        enable_prefix_caching=options.enable_prefix_caching,
        model_salt=f"{runner.info.cache_salt}:{memory.blocks.cache_dtype}",
        max_shareable_prompt_len=runner.info.max_shareable_prompt_len,
        collect_events=options.collect_kv_events,
        collect_token_ids=options.collect_token_ids,
    )


def stored_rows(runner: LoadedRunner) -> StoredRows | None:
    """Return how the runner's KV cache stores encodings of pictures; None: it cannot."""
    row_bytes, memory = runner.info.encoding_row_bytes, runner.kv_memory
    group = None if memory is None else memory.layout.lasting_group
    if not row_bytes or memory is None or group is None:
        return None
    return StoredRows(row_bytes, memory.block_bytes, memory.blocks.block_size, group)


def _scheduling_for(runner: LoadedRunner, config: SchedulerConfig) -> SchedulerConfig:
    speculation = runner.speculation
    if runner.kv_memory is None:
        config = config.without_chunks()
    return replace(
        config,
        num_lookahead_tokens=0 if speculation is None else speculation.num_tokens,
        max_model_len=runner.info.max_model_len,
        vocab_size=runner.info.vocab_size,
        eos_token_ids=frozenset(runner.info.eos_token_ids),
        picture_rows=runner.info.picture_rows,
        whole_pictures=runner.info.sees_whole_pictures and runner.info.has_decoder,
        takes_prompt_embeds=runner.info.takes_prompt_embeds,
        stored_rows=stored_rows(runner),
        pooling=runner.info.pooling,
        max_loras=0 if runner.adapters is None else runner.adapters.max_loras,
        can_generate=runner.info.can_generate and runner.info.has_decoder,
        check_extra_args=runner.processors.check,
    )
