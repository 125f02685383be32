"""Admission of waiting requests: a list of rules for each way to start. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from baton.core.output import Failure, FailureCause, FinishReason
from baton.core.request import TaskOutput
from baton.engine.kv_arrival.fills import PrefixNeed
from baton.engine.kv_cache.cache_group import PrefixHit
from baton.engine.scheduler.prompt_budget import PromptBudget
from baton.engine.scheduler.queues import waiting_key
from baton.engine.scheduler.request import Request, RequestStatus
from baton.engine.scheduler.state import SchedulerState

NO_HIT = PrefixHit(0, ())
PIXELS_LOST = "this node has no pixels of a picture, nor its encoding, to compute KV that it lacks"


class Refusal(Enum):
    """Treatment of the head of the waiting queue if it cannot start now."""

    SET_ASIDE = "set aside"  # it has left its place: the requests behind it pass
    BLOCKS = "blocks"  # it keeps its place: the requests behind it wait, too


@dataclass(slots=True)
class Candidate:
    """The head of the waiting queue, with what the rules have found so far."""

    request: Request
    max_num_hits: int
    continues_at: int | None  # position of the first token to compute; None: the hit's
    num_spare: int  # blocks to leave free for requests that hold some, or for other clients
    hit: PrefixHit = NO_HIT
    num_missing: int = 0  # prompt tokens that are not cached
    chunk: int = 0  # prompt tokens of the first step


Rule = Callable[[Candidate], Refusal | None]


class _Way(NamedTuple):
    """A way to start: the first rule that refuses ends the attempt."""

    rules: tuple[Rule, ...]
    start: Callable[[Candidate], None]


class AdmissionRules:
    """Starts waiting requests, if all rules of their way to start pass.

    Cheap rules come first. The last one takes the blocks, so that no other must give them back.
    """

    def __init__(self, state: SchedulerState, budget: PromptBudget) -> None:
        self._state = state
        self._budget = budget
        self._config = state.config
        # Rules of what the engine has: places for adapters, and pictures.
        adapters = (self._require_adapter_place,) if self._config.max_loras else ()
        pictures = (self._begin_before_picture,) if state.media is not None else ()
        compute = _Way(
            (
                self._reject_known_shortage,
                # Before a place is free: fills need none, and run while the request waits for one.
                self._await_fill,
                *adapters,
                self._require_place,
                self._find_prefix,
                self._await_evicted,
                *pictures,
                # After the lookup: a long prompt whose prefix is cached counts as short.
                self._limit_long_prompts,
                self._require_tokens,
                self._require_encodings,
                self._take_blocks,
            ),
            self._start_prefill,
        )
        self._receive = _Way(
            (
                self._reject_known_shortage,
                *adapters,
                self._limit_receives,
                self._find_prefix,
                self._await_fill,
                self._take_blocks,
            ),
            self._grant_to_peer,
        )
        prefetch = _Way((self._await_fill, self._find_prefix), self._end_prefetch)
        self._ways = {
            TaskOutput.TOKENS: compute,
            TaskOutput.VECTOR: compute,
            TaskOutput.VECTORS: compute,
            TaskOutput.ENCODING: compute,
            TaskOutput.KV: prefetch,
        }

    def try_start(self, request: Request) -> Refusal | None:
        """Start the head of the waiting queue, or return why not."""
        way, candidate = self._way_of(request), self._candidate(request)
        for rule in way.rules:
            # Later rules rely on what earlier ones found, so that none runs after a refusal.
            refusal = rule(candidate)
            if refusal is not None:
                return refusal
        way.start(candidate)
        return None

    def _way_of(self, request: Request) -> _Way:
        task = request.submitted.task
        if request.arrival.handoff is not None and task.has_decode_leg:
            return self._receive
        return self._ways[task.output]

    def _candidate(self, request: Request) -> Candidate:
        num_spare = self._state.num_spare(request)
        if request.arrival.handoff is None:
            return Candidate(request, request.max_num_hit_tokens, None, num_spare)
        # All its tokens arrive, the first output token included: none is left to compute.
        num_tokens = request.num_tokens
        return Candidate(request, num_tokens, num_tokens, num_spare)

    # --- rules: places and tokens -------------------------------------------------

    def _require_place(self, candidate: Candidate) -> Refusal | None:
        is_full = len(self._state.batch) >= self._config.max_num_seqs
        return Refusal.BLOCKS if is_full or self._budget.is_spent else None

    def _require_adapter_place(self, candidate: Candidate) -> Refusal | None:
        """Set a request aside while other adapters take all places. Those that need none pass."""
        state, request = self._state, candidate.request
        if not request.adapter_id:
            return None
        if state.adapters.has_place(request.adapter_id) and not self._is_place_claimed(request):
            return None
        if request.adapter_wait_until_s is None:
            request.adapter_wait_until_s = state.now_s + self._config.max_adapter_wait_s
        state.waiting.await_place(request)
        return Refusal.SET_ASIDE

    def _is_place_claimed(self, request: Request) -> bool:
        """Return whether a request ahead of this one waits for its adapter to give up its place.

        A claim begins at once over requests of lower priority, and after a time over all that rank
        behind. It is one on the place that was taken first, so that the others stay in use.
        """
        first = self._state.waiting.first_for_place()
        if first is None or request.adapter_id != self._state.adapters.oldest:
            return False
        if waiting_key(first) > waiting_key(request):
            return False
        is_overdue = (first.adapter_wait_until_s or 0.0) <= self._state.now_s
        return is_overdue or first.rank[0] < request.rank[0]

    def _limit_receives(self, candidate: Candidate) -> Refusal | None:
        """Grants need neither tokens nor a place in the batch. They hold blocks until they do."""
        return None if self._state.can_receive else Refusal.BLOCKS

    def _limit_long_prompts(self, candidate: Candidate) -> Refusal | None:
        """Set a long prompt aside while others are in progress, so that short ones pass."""
        request, hit = candidate.request, candidate.hit
        candidate.num_missing = request.num_tokens - hit.num_blocks * self._state.cache.block_size
        request.is_long = self._budget.is_long(candidate.num_missing)
        if not request.is_long or self._budget.allows_long(request):
            return None
        self._state.waiting.set_aside(request)
        return Refusal.SET_ASIDE

    def _require_tokens(self, candidate: Candidate) -> Refusal | None:
        candidate.chunk = self._budget.first_chunk(candidate.request, candidate.num_missing)
        return None if candidate.chunk else Refusal.BLOCKS

    # --- rules: pictures ----------------------------------------------------------

    def _require_encodings(self, candidate: Candidate) -> Refusal | None:
        """Cut the first chunk before a picture that there is no room to encode.

        A decode node has no pixels: a request that lost the KV of its pictures ends there. So does
        one whose encodings another node has written here, if they are evicted before it starts.
        """
        request, start = candidate.request, self._start_of(candidate)
        if request.media is None:
            return None
        planner = self._state.media
        has_all = not request.media.lacking(start)
        cache = self._state.cache
        room = cache.pool.num_blocks - cache.num_missing(request.kv, candidate.hit)
        if not has_all and (planner is None or not planner.can_encode(request.media, start, room)):
            failure = Failure(PIXELS_LOST, FailureCause.KV_LOST)
            self._state.end(request, FinishReason.ERROR, failure)
            return Refusal.SET_ASIDE
        if planner is not None:
            num_left = self._budget.num_left_in_step
            candidate.chunk = planner.limit(request.media, start, candidate.chunk, num_left)
        return None if candidate.chunk else Refusal.BLOCKS

    def _start_of(self, candidate: Candidate) -> int:
        return candidate.hit.num_blocks * self._state.cache.block_size

    def _begin_before_picture(self, candidate: Candidate) -> Refusal | None:
        """Shorten a prefix that ends inside a picture whose tokens are computed together."""
        media, own = self._state.media, candidate.request.media
        while media is not None and own is not None:
            start = self._start_of(candidate)
            candidate.max_num_hits = min(candidate.max_num_hits, media.begin_whole(own, start))
            if candidate.max_num_hits >= start:
                break
            self._find_prefix(candidate)  # it can end inside an earlier picture
        return None

    # --- rules: the prefix --------------------------------------------------------

    def _find_prefix(self, candidate: Candidate) -> Refusal | None:
        candidate.hit = self._state.cache.find_prefix(
            candidate.request.kv, candidate.max_num_hits, continues_at=candidate.continues_at
        )
        return None

    def _await_fill(self, candidate: Candidate) -> Refusal | None:
        """Let a request wait, without blocks, for a fill that gets more of its prefix.

        Fills begin for all requests that reach the head, also while the batch is full. A receiver
        waits for blocks that its peer need not send then.
        """
        state, arrival = self._state, candidate.request.arrival
        token_s = self._budget.pace.token_s
        if arrival.handoff is not None:
            token_s = state.arrivals.pulls.receive_token_s(arrival.handoff.source, state.now_s)
        elif candidate.request.is_fetch_of_media:
            token_s = math.inf  # what another node has encoded cannot be computed here
        need = PrefixNeed(
            candidate.max_num_hits,
            token_s,
            state.now_s,
            state.num_spare_blocks,
            candidate.continues_at,
            candidate.hit.num_blocks,
        )
        wait = state.arrivals.find_fill(arrival, need)
        if wait is None:
            return None
        fill_id, until_s = wait
        self._budget.note_look_up(candidate.request)
        state.waiting.follow(candidate.request, fill_id, until_s)
        return Refusal.SET_ASIDE

    def _await_evicted(self, candidate: Candidate) -> Refusal | None:
        """Wait once more if blocks were evicted that the request had found while it waited."""
        is_shorter = candidate.request.arrival.may_look_again(candidate.hit.num_blocks)
        return self._await_fill(candidate) if is_shorter else None

    # --- rules: blocks ------------------------------------------------------------

    def _reject_known_shortage(self, candidate: Candidate) -> Refusal | None:
        """Skip a head that lacked blocks before, until it would fare better. Costs no lookup."""
        return Refusal.BLOCKS if self._state.lasts(candidate.request.shortage) else None

    def _take_blocks(self, candidate: Candidate) -> Refusal | None:
        """Allocate all blocks of the prompt at once: a prefill never waits for blocks halfway."""
        cache, request, hit = self._state.cache, candidate.request, candidate.hit
        planner = self._state.media if request.arrival.handoff is None else None
        if request.media is not None and planner is not None:
            planner.hold(request.kv, request.media, self._start_of(candidate))
        if cache.admit(request.kv, hit, spare=candidate.num_spare):
            request.note_admission()
            self._state.clients.hold(request)
            if request.adapter_id:
                self._state.adapters.take(request.submitted)
            return None
        if request.media is not None and planner is not None:
            planner.release(request.request_id)
        request.shortage = self._state.shortage_of(request, hit, candidate.max_num_hits)
        return Refusal.BLOCKS

    # --- starts -------------------------------------------------------------------

    def _start_prefill(self, candidate: Candidate) -> None:
        """Move a request into the batch, with a first chunk of tokens."""
        state, request = self._state, candidate.request
        state.waiting.remove(request)
        request.move(RequestStatus.RUNNING)
        state.batch.start_prefill(request, candidate.chunk)
        start = self._start_of(candidate)
        state.use_media(request, start, candidate.chunk, candidate.chunk)
        # A sender's cached blocks need not be computed: the peer can have them at once.
        state.arrivals.sends.send(request.submitted.send_to, request.kv, candidate.hit.num_blocks)
        self._budget.give(request, candidate.chunk, candidate.num_missing)
        self._budget.note_start(request)

    def _grant_to_peer(self, candidate: Candidate) -> None:
        """Let the peer write the missing blocks."""
        state, request = self._state, candidate.request
        state.waiting.remove(request)
        request.move(RequestStatus.WAITING_FOR_REMOTE_KVS)
        state.num_waiting_for_remote_kvs += 1
        state.arrivals.receives.grant(request.arrival, candidate.hit.num_blocks, state.now_s)

    def _end_prefetch(self, candidate: Candidate) -> None:
        """End a request that gets no token: its prefix is loaded as far as possible."""
        cache, request, hit = self._state.cache, candidate.request, candidate.hit
        self._budget.note_look_up(request)
        cache.keep(hit)
        request.num_cached_tokens = hit.num_blocks * cache.block_size
        self._state.end(request, FinishReason.LENGTH)
