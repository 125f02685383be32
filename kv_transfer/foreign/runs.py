"""Runs of a pull, which are read one after the other, and how a pull is split into them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import BlockId
from baton.kv_transfer.foreign.metadata import ForeignBlocks
from baton.kv_transfer.foreign.types import ForeignPull


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a prompt on the server, and the blocks here that they fill."""

    remote_block_ids: tuple[int, ...]
    first_token: int  # in the first of them, of the first block to fill
    first: int  # index in the pull of the first block to fill
    block_ids: tuple[BlockId, ...]


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
    run: Run
    blocks: ForeignBlocks
    bay: Bay
    give_back: Callable[[Bay], None]


def find_excess(kv: ForeignKv, blocks: ForeignBlocks, num_tokens: int) -> str:
    """Return why the server cannot have `num_tokens` of a prompt; empty if it can."""
    num_needed = -(-num_tokens // blocks.block_size)
    if num_tokens > kv.num_tokens or num_needed > len(kv.block_ids):
        return (
            f"{len(kv.block_ids)} blocks of {blocks.block_size} tokens do not hold {num_tokens} "
            f"of {kv.num_tokens} tokens"
        )
    if max(kv.block_ids) >= blocks.num_blocks:
        return f"it has {blocks.num_blocks} blocks, and no block {max(kv.block_ids)}"
    return ""


def min_run_blocks(block_size: int, remote_size: int) -> int:
    """Return the blocks of the server that a run may need for a single block here."""
    return -(-block_size // remote_size) + 1


def split_pull(pull: ForeignPull, block_size: int, remote_size: int, max_blocks: int) -> list[Run]:
    """Return the runs of a pull, each of at most `max_blocks` blocks of the server."""
    runs: list[Run] = []
    places, first = pull.places, 0
    while first < len(places):
        begin = places[first] * block_size // remote_size
        end = _end_of_run(places, first, block_size, (begin + max_blocks) * remote_size)
        last_token = (places[end - 1] + 1) * block_size
        remote = pull.kv.block_ids[begin : -(-last_token // remote_size)]
        skipped = places[first] * block_size - begin * remote_size
        runs.append(Run(remote, skipped, first, pull.block_ids[first:end]))
        first = end
    return runs


def _end_of_run(places: Sequence[int], first: int, block_size: int, max_tokens: int) -> int:
    """Return the index after the last place, from `first` on, that is consecutive and fits."""
    end = first + 1
    while end < len(places) and places[end] == places[end - 1] + 1:
        if (places[end] + 1) * block_size > max_tokens:
            break
        end += 1
    return end
