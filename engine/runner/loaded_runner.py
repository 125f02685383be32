"""Protocol of a runner with its model, as nodes and `baton.LLM` use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import Protocol, Self

from baton.core.ids import BlockId
from baton.engine.plan import Runner
from baton.engine.runner.model_info import KvMemory, ModelInfo, PassHook
from baton.engine.runner.sampling.logits_processors import Processors
from baton.engine.spec_decode.config import Speculation
from baton.kv_transfer.protocol.conversion import StagedBlocks


class LoadedRunner(Runner, Protocol):
    """A runner that owns a model. Releases its memory when the `with` block ends."""

    info: ModelInfo
    kv_memory: KvMemory
    speculation: Speculation | None
    processors: Processors
    hook: PassHook | None

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def read_blocks(self, block_ids: Sequence[BlockId]) -> Iterator[memoryview]:
        """Yield the bytes of these blocks in order, copied after all work launched so far."""
        ...

    def convert_blocks(self, memory: mmap, staged: StagedBlocks) -> None:
        """Convert blocks of a peer, in the staging area's memory, into those of an order."""
        ...
