"""Invariants of a request's block tables, group by group."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.groups import KvCacheSpec
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_search import name_in_group


def check_tables(
    held: HeldKv, specs: Sequence[KvCacheSpec], block_size: int, pool: BlockPool
) -> None:
    """Raise BlocksUnaccounted unless each group has the blocks that the request needs of it.

    Tables are of one length. Only the blocks that no later token attends to are missing. A cached
    block has the name of its group and place, and blocks of a state have none.
    """
    lengths = {len(table) for table in held.block_tables}
    if len(lengths) > 1:
        raise BlocksUnaccounted(f"{held.request_id}: tables of {sorted(lengths)} blocks")
    for group, (spec, table) in enumerate(zip(specs, held.block_tables, strict=False)):
        where = f"{held.request_id}, group {group} ({spec})"
        _check_missing(where, table, spec.num_unseen(held.num_tokens) // block_size)
        _check_names(where, held, group, pool)
    for side in held.state.sides(held.num_computed_tokens) if held.state else ():
        if any(pool.name_of(block_id) is not None for block_id in side):
            raise BlocksUnaccounted(f"{held.request_id}: a block of its state is cached")


def _check_missing(where: str, table: Sequence[BlockId], num_unseen: int) -> None:
    """Check that only leading blocks are missing, and none that a later token attends to."""
    num_missing = table.count(NO_BLOCK)
    if num_missing > num_unseen or NO_BLOCK in table[num_missing:]:
        raise BlocksUnaccounted(f"{where}: {num_missing} blocks are missing, {num_unseen} unseen")


def _check_names(where: str, held: HeldKv, group: int, pool: BlockPool) -> None:
    for place, (block_id, block_hash) in enumerate(
        zip(held.block_tables[group], held.block_hashes, strict=False)
    ):
        name = None if block_id == NO_BLOCK else pool.name_of(block_id)
        if name is not None and name != name_in_group(block_hash, group):
            raise BlocksUnaccounted(
                f"{where}: block {block_id} at place {place} is cached as {name.hex()}"
            )
