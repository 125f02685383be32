"""Preemption for a waiting request of higher priority, or of a client below its share. Pure.

Without it, the priority policy orders only the waiting queue, and an urgent request waits until
running ones end. Preemption is bounded: a request is preempted this way at most once, only for a
strictly higher priority, and only if the candidates together free enough blocks. Its KV stays in
the prefix cache until evicted.
"""

from __future__ import annotations

from collections import Counter

from baton.core.ids import BlockId
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.cache_group import PrefixHit
from baton.engine.scheduler.config import SchedulingPolicy
from baton.engine.scheduler.request import BY_RANK, Request
from baton.engine.scheduler.state import SchedulerState


def victims_for(state: SchedulerState, head: Request) -> list[Request]:
    """Return the running requests to preempt so that `head` gets its places and its blocks.

    `head` is the head of the waiting queue, or the first that waits for a place of its adapter.
    They must be preempted before a step is planned, since scheduled requests are not.
    """
    if state.config.policy is not SchedulingPolicy.PRIORITY or state.lasts(head.lasting_shortage):
        return []
    holders = _place_holders(state, head)
    if holders is None or (head.arrival.handoff is not None and not state.can_receive):
        return []  # preemption cannot give what it lacks
    candidates = _candidates(state, head)
    if not candidates:
        return []
    candidates.sort(key=lambda each: each not in holders)
    hit = find_prefix(state, head)
    shortage = num_missing_blocks(state, head, hit)
    num_freed = [state.cache.pool.num_held_once(each.kv.block_ids) for each in candidates]
    # All or nothing: preempting some would cost their progress, and the head would still wait.
    if sum(num_freed) < shortage:
        head.lasting_shortage = state.shortage_of(head, hit, head.max_num_hit_tokens)
        return []
    lacks_place = head.arrival.handoff is None and len(state.batch) >= state.config.max_num_seqs
    num_missing_places = int(lacks_place)
    victims: list[Request] = []
    for candidate, num_blocks in zip(candidates, num_freed, strict=True):
        if len(victims) >= len(holders) and shortage <= 0 and num_missing_places <= 0:
            break
        victims.append(candidate)
        shortage -= num_blocks
        num_missing_places -= 1
    return victims


def _candidates(state: SchedulerState, head: Request) -> list[Request]:
    """Return the running requests that can be preempted for `head`, the lowest-ranked first."""
    found = [each for each in state.batch.running.values() if _is_candidate(state, head, each)]
    return sorted(found, key=BY_RANK, reverse=True)


def _is_candidate(state: SchedulerState, head: Request, request: Request) -> bool:
    return (
        request.submitted.priority > head.submitted.priority
        and not request.was_preempted_for_priority
        and not state.arrivals.sends.has_sent(request.submitted.send_to)
    )


def _place_holders(state: SchedulerState, head: Request) -> set[Request] | None:
    """Return the candidates that hold the place of an adapter, if `head` lacks one for its own.

    None: each place is held by a request that is no candidate.
    """
    if not head.adapter_id or state.adapters.has_place(head.adapter_id):
        return set()
    running = state.batch.running
    found = [
        {running[request_id] for request_id in holders}
        for holders in state.adapters.holders()
        if all(
            request_id in running and _is_candidate(state, head, running[request_id])
            for request_id in holders
        )
    ]
    # The laxest: that whose first request in rank ranks last.
    return max(found, key=lambda holders: min(map(BY_RANK, holders)), default=None)


def find_prefix(state: SchedulerState, head: Request) -> PrefixHit:
    continues_at = None if head.arrival.handoff is None else head.num_tokens
    return state.cache.find_prefix(head.kv, head.max_num_hit_tokens, continues_at=continues_at)


def num_missing_blocks(state: SchedulerState, head: Request, hit: PrefixHit) -> int:
    """Return the number of blocks that must become free for `head` to be admitted."""
    num_missing = state.cache.num_missing(head.kv, hit) + state.num_spare(head)
    return num_missing - state.cache.pool.num_free


def victims_over_share(state: SchedulerState, head: Request) -> list[Request]:
    """Return the requests to preempt so that `head`, the head of the waiting queue, gets blocks.

    Its client must stay within its share of the blocks.

    A client whose requests fill the KV cache would keep others waiting until some of these end. The
    preempted requests wait until blocks are free, and the first of each client in rank goes on, so
    that each client's requests end.
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
