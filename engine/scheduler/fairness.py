"""Preemption for a waiting request of a client that holds less than its share. Pure.

A client whose requests fill the KV cache would keep others waiting until some of these end. The
preempted requests wait until blocks are free, and the first of each client in rank goes on, so that
each client's requests end.
"""

from __future__ import annotations

from collections import Counter

from baton.core.ids import BlockId
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.state import SchedulerState
from baton.engine.scheduler.urgency import find_prefix, num_missing_blocks


def victims_over_share(state: SchedulerState, head: Request) -> list[Request]:
    """Return the requests to preempt so that `head`, the head of the waiting queue, gets blocks.

    Its client must stay within its share of the blocks.
    """
    if not state.clients.is_shared or state.lasts(head.lasting_unfairness):
        return []
    if not _can_start(state, head) or _exceeds_share(state, head):
        return []
    hit = find_prefix(state, head)
    # Before it is admitted, requests that decode get the blocks that they need in this step.
    num_growing = len(state.batch.due_next()) * state.cache.num_groups
    num_missing = num_missing_blocks(state, head, hit) + num_growing
    candidates = [
        each
        for each in state.preemptable()
        if each.client != head.client and each.rank[0] >= head.rank[0]
    ]
    freed = _FreedBlocks(state.cache.pool, _num_spare(state, head))
    victims = state.clients.choose_over_share(candidates, num_missing, freed.add)
    if not victims:
        head.lasting_unfairness = state.shortage_of(head, hit, head.max_num_hit_tokens)
    return victims


def _can_start(state: SchedulerState, head: Request) -> bool:
    """Return whether blocks are all that it may lack."""
    if head.adapter_id and not state.adapters.has_place(head.adapter_id):
        return False
    if head.arrival.handoff is not None:
        return state.can_receive
    return len(state.batch) < state.config.max_num_seqs


def _exceeds_share(state: SchedulerState, head: Request) -> bool:
    num_blocks = state.cache.num_blocks_for(head.num_tokens) * state.cache.num_groups
    return state.clients.num_held(head.client) + num_blocks > state.clients.share


def _num_spare(state: SchedulerState, head: Request) -> int:
    """Return the blocks that a grant for `head` leaves free for each request that holds some."""
    return 0 if head.arrival.handoff is None else state.num_headroom_blocks


class _FreedBlocks:
    """Blocks that are free without some requests, which may share blocks."""

    def __init__(self, pool: BlockPool, num_spare: int) -> None:
        self._pool = pool
        self._num_spare = num_spare  # that each request needs
        self._num_dropped: Counter[BlockId] = Counter()

    def add(self, request: Request) -> int:
        """Return how many more are free without this request, too."""
        num_freed = self._num_spare
        for block_id in request.kv.block_ids:
            self._num_dropped[block_id] += 1
            num_freed += self._num_dropped[block_id] == self._pool.num_references(block_id)
        return num_freed
