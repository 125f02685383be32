"""Protocol of a runner with its model, as nodes and `baton.LLM` use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol, Self, TypeGuard

from baton.engine.plan import Runner
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.device.block_copies import BlockCopies
from baton.engine.runner.device.graphs import EagerCause, GraphSize
from baton.engine.runner.model_info import KvMemory, ModelInfo, PassHook
from baton.engine.runner.sampling.logits_processors import Processors
from baton.engine.spec_decode.config import Speculation


class LoadedRunner(Runner, Protocol):
    """A runner that owns a model. Releases its memory when the `with` block ends."""

    info: ModelInfo
    adapters: AdapterTable | None
    num_passes: Counter[GraphSize | EagerCause]  # by graph, or why eager
    speculation: Speculation | None
    processors: Processors
    hook: PassHook | None

    @property
    def kv_memory(self) -> KvMemory | None:
        """Return the KV cache; None: the model computes whole texts and keeps nothing of them."""
        ...

    def when_lost(self, call: Callable[[Exception], None]) -> None:
        """Have any thread call this once the runner can run nothing any more."""
        ...

    def read_collectives_s(self) -> float:
        """Return how long passes have exchanged numbers between processes, or waited for them."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class CachingRunner(LoadedRunner, Protocol):
    """A runner with a KV cache."""

    blocks: KvBlocks

    @property
    def kv_memory(self) -> KvMemory: ...

    def make_block_copies(self) -> BlockCopies | None:
        """Return copies between the KV cache and pinned memory; None if the CPU can access it."""
        ...


def has_kv_cache(runner: LoadedRunner) -> TypeGuard[CachingRunner]:
    return runner.kv_memory is not None
