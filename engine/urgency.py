"""Preemption of running requests for a waiting one of higher priority. Pure.

Without it, the priority policy orders the waiting line alone, and an urgent request waits until
running ones end. Preemption is bounded: a request gives way at most once in its life, only to a
strictly higher priority, and only where those that may give way together free enough blocks. What
it computed stays in the prefix cache while there is room.
"""

from __future__ import annotations

from engine.book import RequestBook
from engine.lifecycle import Request
from engine.scheduler_config import Policy


def give_way(book: RequestBook, head: Request, max_hit_tokens: int) -> None:
    """Preempt what keeps `head`, the head of the waiting line, from its place or its blocks.

    To be called before a step is planned: what a plan schedules is not preempted.
    """
    victims = _victims(book, head)
    if not victims:
        return
    shortage = _shortage(book, head, max_hit_tokens)
    num_freed = [book.cache.pool.num_held_once(victim.block_ids) for victim in victims]
    if sum(num_freed) < shortage:
        return
    lacks_place = head.receive is None and len(book.batch) >= book.config.max_num_seqs
    num_missing_places = int(lacks_place)
    for victim, num_blocks in zip(victims, num_freed, strict=True):
        if shortage <= 0 and num_missing_places <= 0:
            return
        victim.gave_way = True
        book.preempt(victim)
        shortage -= num_blocks
        num_missing_places -= 1


def _victims(book: RequestBook, head: Request) -> list[Request]:
    """Running requests that may give way to `head`, the last in rank first."""
    if book.config.policy is not Policy.PRIORITY:
        return []
    found = [
        request
        for request in book.batch.running.values()
        if request.spec.priority > head.spec.priority
        and not request.gave_way
        and not book.handoffs.has_sent(request)
    ]
    return sorted(found, key=lambda request: request.rank, reverse=True)


def _shortage(book: RequestBook, head: Request, max_hit_tokens: int) -> int:
    """Blocks that must become free for `head` to be admitted."""
    hits = book.cache.find_prefix(head, max_hit_tokens)
    num_missing = book.cache.num_blocks_for(head.num_tokens) - len(hits)
    if head.receive is not None:
        num_holders = book.num_waiting_for_remote_kvs + len(book.ready) + len(book.batch)
        num_missing += num_holders * book.config.remote_headroom_blocks
    return num_missing - (book.cache.pool.num_free - book.cache.pool.num_free_among(hits))
