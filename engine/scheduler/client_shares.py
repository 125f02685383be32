"""Shares of the KV cache: the blocks that each client's requests and hand-offs hold. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from baton.core.ids import HandoffId, RequestId
from baton.engine.scheduler.request import BY_RANK, Request

# Shares of all blocks: while fewer than the first are free, hand-offs leave the second free.
SCARCE_SHARE, RESERVED_SHARE = 0.5, 0.25


class ClientShares:
    """Clients that have requests have equal shares. A client may hold more while no other waits.

    A request that sends its KV counts until its hand-off has ended, which is after its last token.
    Blocks that several requests share count for each of them. Blocks of requests are counted only
    while there are several clients.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self._num_blocks = num_blocks
        self._num_groups = num_groups
        self._num_requests: Counter[str] = Counter()  # that have not ended, by client
        self._holders: dict[str, dict[RequestId, Request]] = {}
        # Hand-offs whose requests have ended, with the number of their blocks.
        self._handoffs: dict[HandoffId, tuple[str, int]] = {}
        self._num_handed_off: Counter[str] = Counter()  # blocks, by client

    def add(self, request: Request) -> None:
        self._num_requests[request.client] += 1

    def remove(self, client: str) -> None:
        self._num_requests[client] -= 1
        if not self._num_requests[client]:
            del self._num_requests[client]

    def hand_off(self, handoff_id: HandoffId, client: str, num_blocks: int) -> None:
        """Note that a request has ended whose blocks are still being sent."""
        self._handoffs[handoff_id] = (client, num_blocks)
        self._count_handed_off(client, num_blocks)

    def end_handoff(self, handoff_id: HandoffId) -> str | None:
        """Stop counting a hand-off. Returns its client; None if it was not counted."""
        client, num_blocks = self._handoffs.pop(handoff_id, (None, 0))
        if client is not None:
            self._count_handed_off(client, -num_blocks)
            self.remove(client)
        return client

    def hold(self, request: Request) -> None:
        """Note that a request has got its blocks."""
        self._holders.setdefault(request.client, {})[request.request_id] = request

    def release(self, request: Request) -> None:
        """Note that a request holds no blocks any more, if it held some."""
        holders = self._holders.get(request.client, {})
        holders.pop(request.request_id, None)
        if not holders:
            self._holders.pop(request.client, None)

    @property
    def is_shared(self) -> bool:
        return len(self._num_requests) > 1

    @property
    def share(self) -> int:
        return self._num_blocks // max(1, len(self._num_requests))

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended, or whose KV is still being sent."""
        return self._num_requests.total()

    @property
    def num_handoffs(self) -> int:
        return len(self._handoffs)

    def num_held(self, client: str) -> int:
        """Return the blocks that a client holds; 0 while there is only one client."""
        if not self.is_shared:
            return 0
        num_held = sum(map(self.num_held_by, self._holders.get(client, {}).values()))
        return num_held + self._num_handed_off[client]

    def num_held_by(self, request: Request) -> int:
        return request.kv.num_blocks * self._num_groups

    def num_reserved(self, client: str, num_free: int) -> int:
        """Return the blocks that the next hand-off of a client leaves free for other clients.

        Hand-offs cannot be preempted: while a decode node is full, those of one client would fill
        the cache for as long as that lasts. The first one of a client may take all blocks.
        """
        is_first = client not in self._holders and client not in self._num_handed_off
        is_scarce = num_free < self._num_blocks * SCARCE_SHARE
        return int(self._num_blocks * RESERVED_SHARE) if is_scarce and not is_first else 0

    def choose_victim(self, candidates: Collection[Request]) -> Request:
        """Return the request to preempt when blocks are short.

        Of those with the lowest priority, it is the last one of the client that holds most. The
        first of all in rank stays, so that requests end, however clients change.
        """
        if not self.is_shared or len(candidates) == 1:
            return max(candidates, key=BY_RANK)
        first = min(candidates, key=BY_RANK)
        others = [each for each in candidates if each is not first]
        lowest = max(each.rank[0] for each in others)
        num_held = self._num_held_by_client(others)
        return max(
            (each for each in others if each.rank[0] == lowest),
            key=lambda each: (num_held[each.client], each.rank),
        )

    def choose_over_share(
        self,
        candidates: Collection[Request],
        num_missing: int,
        num_freed: Callable[[Request], int],
    ) -> list[Request]:
        """Return requests of clients above their share that free the missing blocks, or none.

        `num_freed` returns how many more blocks are free without a request, and is called once for
        each that is chosen, in this order. The first of each client in rank stays.
        """
        left: dict[str, list[Request]] = {}
        for request in sorted(candidates, key=BY_RANK):
            left.setdefault(request.client, []).append(request)
        num_held = self._num_held_by_client(candidates)
        victims: list[Request] = []
        while num_missing > 0:
            over = [each for each in left if num_held[each] > self.share and len(left[each]) > 1]
            if not over:
                return []
            victim = left[max(over, key=num_held.__getitem__)].pop()
            num_held[victim.client] -= self.num_held_by(victim)
            num_missing -= num_freed(victim)
            victims.append(victim)
        return victims

    def _count_handed_off(self, client: str, num_blocks: int) -> None:
        self._num_handed_off[client] += num_blocks
        if not self._num_handed_off[client]:
            del self._num_handed_off[client]

    def _num_held_by_client(self, requests: Collection[Request]) -> dict[str, int]:
        return {client: self.num_held(client) for client in {each.client for each in requests}}
