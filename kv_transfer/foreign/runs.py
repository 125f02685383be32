"""Runs of a pull, which are read one after the other. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple

from baton.core.foreign_kv import ForeignKv
from baton.kv_transfer.foreign.metadata import ForeignBlocks
from baton.kv_transfer.foreign.types import ForeignPull
from baton.kv_transfer.layout import KvLayout, LayoutRun, StagedRun


class Bay(NamedTuple):
    """Part of the staging memory of a session."""

    memory: mmap
    offset: int


@dataclass(frozen=True, slots=True)
class RunRead:
    """Blocks that are read, to be converted. Their bay is lent until it is given back.

    It is given back on the reader's thread, even if its session is closed by then.
    """

    pull: ForeignPull
    run: LayoutRun
    blocks: ForeignBlocks
    bay: Bay
    give_back: Callable[[Bay], None]

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Return the blocks on the server."""
        return remote_blocks(self.pull, self.run)

    def staged_for(self, target: KvLayout) -> StagedRun:
        layout, run = self.blocks.layout, self.run
        block_ids = self.pull.block_ids[run.target.start : run.target.stop]
        offset, num_blocks = self.bay.offset, len(run.source)
        return StagedRun(layout, target, offset, num_blocks, run.first_token, block_ids)


def remote_blocks(pull: ForeignPull, run: LayoutRun) -> tuple[int, ...]:
    return pull.kv.block_ids[run.source.start : run.source.stop]


def find_excess(kv: ForeignKv, blocks: ForeignBlocks, num_tokens: int) -> str:
    """Return why the server cannot have `num_tokens` of a prompt; empty if it can."""
    size = blocks.layout.block_size
    num_needed = -(-num_tokens // size)
    if num_tokens > kv.num_tokens or num_needed > len(kv.block_ids):
        return (
            f"{len(kv.block_ids)} blocks of {size} tokens do not hold {num_tokens} "
            f"of {kv.num_tokens} tokens"
        )
    if max(kv.block_ids) >= blocks.num_blocks:
        return f"it has {blocks.num_blocks} blocks, and no block {max(kv.block_ids)}"
    return ""


def min_run_blocks(block_size: int, remote_size: int) -> int:
    """Return the blocks of the server that a run may need for a single block here."""
    return -(-block_size // remote_size) + 1
