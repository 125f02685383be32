"""Preemption of running requests for a waiting one of higher priority. Pure.

Without it, the priority policy orders only the waiting queue, and an urgent request waits until
running ones end. Preemption is bounded: a request is preempted this way at most once, only for a
strictly higher priority, and only if the candidates together free enough blocks. Its KV stays in
the prefix cache until evicted.
"""

from __future__ import annotations

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
