"""Runner with its model, as nodes and `baton.LLM` use it."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Self, TypeGuard

from baton.engine.plan import Pending, Plan
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.device.block_copies import BlockCopies
from baton.engine.runner.device.device import Device
from baton.engine.runner.device.graphs import EagerCause, GraphSize
from baton.engine.runner.model_info import KvMemory, ModelInfo, PassHook
from baton.engine.runner.sampling.logits_processors import NO_PROCESSORS, Processors
from baton.engine.spec_decode.config import Speculation


class LoadedRunner:
    """Base of the runners, which own a model. The `with` block releases its memory at its end."""

    kv_memory: KvMemory | None = None  # the KV cache; None: the model computes whole texts

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.adapters: AdapterTable | None = None
        self.num_passes: Counter[GraphSize | EagerCause] = Counter()  # by graph, or why eager
        self.speculation: Speculation | None = None
        self.processors: Processors = NO_PROCESSORS
        self.hook: PassHook | None = None

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def launch(self, plan: Plan) -> Pending:
        """See `Runner`."""

    def when_lost(self, call: Callable[[Exception], None]) -> None:
        """Have any thread call this once the runner can run nothing any more.

        One of a single process never calls it.
        """

    def read_collectives_s(self) -> float:
        """Return how long passes have exchanged numbers between processes, or waited for them."""
        return 0.0


class CachingRunner(LoadedRunner):
    """Base of the runners with a KV cache."""

    kv_memory: KvMemory
    blocks: KvBlocks
    device: Device

    def make_block_copies(self) -> BlockCopies | None:
        """Return copies between the KV cache and pinned memory; None if the CPU can access it."""
        stream = self.device.make_copy_stream()
        return None if stream is None else BlockCopies(self.blocks.kv, stream, self.device.record)


def has_kv_cache(runner: LoadedRunner) -> TypeGuard[CachingRunner]:
    return runner.kv_memory is not None
