"""The first half of a step: who gets how many tokens and which blocks.

There is no prefill phase and no decode phase. Each request wants its
`num_computed_tokens` to catch up with its `num_tokens`; a step hands out a token budget:
to the running ones first, then to those whose KV landed, then to those that wait.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from engine.book import RequestBook
from engine.events import RequestEventKind
from engine.hashing import BlockHash
from engine.lifecycle import Request, RequestStatus
from engine.plan import Plan
from engine.prefill_limits import PrefillLimits
from engine.request import ReceiveKv
from engine.step_pace import LEAST_TOKENS, StepPace
from engine.urgency import give_way
from kv_transfer.types import BlockId


class _Verdict(Enum):
    """What became of the request at the head of the line."""

    TAKEN = "taken"
    STEPS_ASIDE = "steps aside"  # a long prompt lets shorter ones pass
    MUST_WAIT = "must wait"  # and so must all behind it
    FOLLOWS = "follows"  # it waits for blocks that another request is receiving


class _Refusal(NamedTuple):
    """The head that found no blocks, and the state of things then.

    While nothing was given back and its prefix is as long as it was, there is no need to look
    the prefix up again.
    """

    request: Request
    num_releases: int
    num_changes: int
    missing_hash: BlockHash | None  # once this block is cached, it needs fewer


class Planner:
    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._config = book.config
        self._num_slots_per_decode = book.config.num_slots_per_decode
        self._limits = PrefillLimits(book.config)
        self._pace = StepPace(book.config.target_step_s)
        self._budget = 0
        self._paced_budget = 0  # of it, for prompts that must not hold up decoding
        self._refused: _Refusal | None = None
        self._held_up: Request | None = None  # the head that the last step left in the line

    def plan(self) -> Plan:
        batch = self._book.batch
        self._give_way()
        preemptions_before = self._book.total_preemptions
        for request in batch.begin_step():
            self._grow(request)
        # Drafted tokens get what is left over: a step that has prompts to compute drafts nothing.
        self._budget = self._config.max_num_batched_tokens - batch.num_decoding
        # Ready before waiting: a request that holds blocks must never stand behind one
        # that waits for them, or neither moves. And before the next chunk of a long prompt,
        # which it shortens by a token: its first token is with the client already.
        none_held_up = self._start_ready()
        self._budget = self._pace.prompt_tokens(batch.num_decoding, self._budget)
        self._paced_budget = self._pace.paced_tokens(batch.num_decoding, self._budget)
        self._continue_prefills()
        self._book.waiting.bring_back(self._book.cache.pool.take_registered())
        # Blocks that a victim just gave up are for those who run; a newcomer would
        # take them and be the next victim.
        is_line_open = none_held_up and self._book.total_preemptions == preemptions_before
        if is_line_open:
            self._take_from_line()
        self._spend_rest(is_line_open)
        if self._config.push_layers:
            self._send_layers()
        return batch.take_plan(self._book.handoffs.take_orders(), self._max_draft_tokens())

    def took(self, seconds: float) -> None:
        """How long the step that was planned last took to run."""
        batch = self._book.batch
        num_prompt_tokens = sum(num_tokens for _, num_tokens in batch.chunks)
        self._pace.took(seconds, batch.num_decoding, num_prompt_tokens)

    def _max_draft_tokens(self) -> int:
        batch = self._book.batch
        if not self._config.num_lookahead_tokens or not batch.num_decoding:
            return 0
        num_prompt_tokens = sum(num_tokens for _, num_tokens in batch.chunks)
        return self._config.max_num_batched_tokens - batch.num_decoding - num_prompt_tokens

    def _give_way(self) -> None:
        """To the head that was held up in the step before, if it is more urgent."""
        head, self._held_up = self._held_up, None
        if head is not None and head is self._book.waiting.head():
            give_way(self._book, head, _num_tokens_to_hit(head))

    # --- running ------------------------------------------------------------------

    def _grow(self, request: Request) -> None:
        """Room for this step's tokens, at the cost of whoever ranks last."""
        cache = self._book.cache
        cache.register(request)
        while request.status is RequestStatus.RUNNING:
            added = self._grow_to_decode(request)
            if added is not None:
                self._book.batch.grow(request, added, cache.capacity(request))
                return
            self._book.preempt(self._book.worst())

    def _grow_to_decode(self, request: Request) -> tuple[BlockId, ...] | None:
        """Blocks for one more step; None if there are too few for a single token.

        With speculation, slots for drafted tokens as far as blocks are free: nobody is
        preempted for them. Clipped to what the request can ever need, where its block table ends.
        """
        num_slots = request.num_computed_tokens + self._num_slots_per_decode
        if num_slots > request.max_num_slots:
            num_slots = request.max_num_slots
        added = self._book.cache.grow(request, num_slots)
        if added is None and self._num_slots_per_decode > 1:
            added = self._book.cache.grow(request, request.num_computed_tokens + 1)
        return added

    # --- ready --------------------------------------------------------------------

    def _start_ready(self) -> bool:
        """False if one was left for want of blocks, not just of a place in the batch.

        Tokens are never short: the budget holds as many decodes as the batch has places.
        """
        book = self._book
        while (head := book.ready.peek()) is not None:
            if len(book.batch) >= self._config.max_num_seqs:
                return True
            request = head[1]
            if not self._make_room_for_ready(request):
                return False
            book.ready.remove(request)
            request.move(RequestStatus.RUNNING)
            book.batch.start_decode(request, book.cache.capacity(request))
            book.note(request, RequestEventKind.SCHEDULED)
            self._budget -= 1
        return True

    def _make_room_for_ready(self, request: Request) -> bool:
        """Those that run will end and make room. If none does, the last of the ready must."""
        book = self._book
        while self._grow_to_decode(request) is None:
            if book.batch.running or len(book.ready) == 1:
                return False
            book.preempt(book.worst())
        return True

    # --- prompts under way -------------------------------------------------------

    def _continue_prefills(self) -> None:
        self._limits.begin_step()
        prefilling = self._book.batch.prefilling.values()
        for request in sorted(prefilling, key=lambda request: request.rank):
            missing = request.num_tokens - request.num_computed_tokens
            chunk = self._limits.next_chunk(missing, self._budget_for(request))
            if chunk:
                self._book.batch.continue_prefill(request, chunk)
                self._spend(request, chunk)
            self._limits.count(request, missing - chunk)

    def _budget_for(self, request: Request) -> int:
        if not (request.spec.is_paced and self._config.enable_chunked_prefill):
            return self._budget
        # A few in any case: it must not keep those behind it in line from their turn.
        return min(self._budget, max(LEAST_TOKENS, self._paced_budget))

    def _spend(self, request: Request, chunk: int) -> None:
        self._budget -= chunk
        if request.spec.is_paced:
            self._paced_budget -= chunk

    def _spend_rest(self, is_line_open: bool) -> None:
        """Give the budget that is left to the prompts that the threshold cut short.

        When one is computed to its end by that, the next long prompt may be taken.
        """
        if not self._budget or not self._limits.allow_rest():
            return
        while self._budget and self._lengthen_chunks():
            if is_line_open:
                self._take_from_line()

    def _lengthen_chunks(self) -> bool:
        """False if no prompt in this step has tokens left to compute."""
        is_any_lengthened = False
        chunks = self._book.batch.chunks
        for place, (request, chunk) in enumerate(chunks):
            if request.spec.is_paced:
                continue
            left = request.num_tokens - request.num_computed_tokens - chunk
            more = min(left, self._budget)
            if not more:
                continue
            is_any_lengthened = True
            chunks[place] = (request, chunk + more)
            self._budget -= more
            if more == left:
                self._limits.uncount(request)
        return is_any_lengthened

    def _send_layers(self) -> None:
        """The blocks that the chunks of this plan complete."""
        book = self._book
        for request, num_tokens in book.batch.chunks:
            num_computed = request.num_computed_tokens + num_tokens
            is_through = num_computed == request.num_tokens
            num_whole = num_computed // book.cache.block_size
            num_blocks = len(request.block_ids) if is_through else num_whole
            book.handoffs.send_layers(request, num_blocks)

    # --- waiting ------------------------------------------------------------------

    def _take_from_line(self) -> None:
        waiting = self._book.waiting
        for receiver_id in self._book.prefixes_in_flight.overdue(self._book.now_s):
            self._book.stop_following(receiver_id)
        while (head := waiting.head(allow_long=self._limits.allows_long)) is not None:
            verdict = self._try_to_take(head)
            if verdict is _Verdict.MUST_WAIT:
                self._held_up = head
                return
            if verdict is _Verdict.STEPS_ASIDE:
                waiting.step_aside(head, until=self._hash_that_makes_short(head))

    def _try_to_take(self, request: Request) -> _Verdict:
        if self._is_still_refused(request):
            return _Verdict.MUST_WAIT
        if request.receive is not None:
            return self._grant(request, request.receive)
        return self._admit(request)

    def _admit(self, request: Request) -> _Verdict:
        """Into the batch, with blocks for all its tokens and a first chunk of them."""
        book = self._book
        if len(book.batch) >= self._config.max_num_seqs or self._budget < 1:
            return _Verdict.MUST_WAIT
        # At least one token is computed here: its logits are the next token.
        max_num_hits = _num_tokens_to_hit(request)
        hits = book.cache.find_prefix(request, max_num_hits)
        missing = request.num_tokens - len(hits) * book.cache.block_size
        request.is_long = self._limits.is_long(missing)
        if request.is_long and not self._limits.allows_long:
            return _Verdict.STEPS_ASIDE
        chunk = self._limits.first_chunk(missing, self._budget_for(request))
        if not chunk:
            return _Verdict.MUST_WAIT
        if not book.cache.admit(request, hits):
            return self._refuse(request, len(hits), max_num_hits)
        book.waiting.remove(request)
        request.move(RequestStatus.RUNNING)
        book.batch.start_prefill(request, chunk)
        book.note(request, RequestEventKind.SCHEDULED)
        book.handoffs.send(request, len(hits))
        self._spend(request, chunk)
        self._limits.count(request, missing - chunk)
        if not request.is_long:
            self._limits.took_short()
        return _Verdict.TAKEN

    def _grant(self, request: Request, receive: ReceiveKv) -> _Verdict:
        """Lend the blocks it lacks to the peer. That costs no budget and no place."""
        book = self._book
        num_underway = book.num_waiting_for_remote_kvs + len(book.ready)
        if num_underway >= self._config.max_num_seqs:
            return _Verdict.MUST_WAIT
        hits = book.cache.find_prefix(request, request.num_tokens)
        if self._follows(request, len(hits)):
            return _Verdict.FOLLOWS
        # Whoever holds blocks must be able to grow, or all would wait for each other.
        # When nobody does, the whole cache may be granted.
        num_holders = num_underway + len(book.batch)
        spare = num_holders * self._config.remote_headroom_blocks
        if not book.cache.admit(request, hits, spare=spare):
            return self._refuse(request, len(hits), request.num_tokens)
        book.waiting.remove(request)
        request.move(RequestStatus.WAITING_FOR_REMOTE_KVS)
        book.num_waiting_for_remote_kvs += 1
        book.handoffs.receive(request, receive, len(hits))
        book.prefixes_in_flight.begin(request, len(hits), book.now_s)
        book.note(request, RequestEventKind.GRANTED)
        return _Verdict.TAKEN

    def _follows(self, request: Request, num_hits: int) -> bool:
        """Let it wait, without blocks, for a hand-off that brings most of what it lacks."""
        book = self._book
        num_blocks = book.cache.num_blocks_for(request.num_tokens)
        receiver_id = book.prefixes_in_flight.receiver_for(request, num_hits, num_blocks)
        if receiver_id is None:
            return False
        if request.follows_until_s is None:
            request.follows_until_s = book.now_s + self._config.max_prefix_wait_s
        if book.now_s >= request.follows_until_s:
            return False
        book.waiting.follow(request, receiver_id)
        return True

    def _refuse(self, request: Request, num_hits: int, max_num_tokens: int) -> _Verdict:
        cache = self._book.cache
        missing_hash = cache.missing_hash(request, num_hits, max_num_tokens)
        self._refused = _Refusal(
            request, cache.pool.num_releases, self._book.num_changes, missing_hash
        )
        return _Verdict.MUST_WAIT

    def _is_still_refused(self, request: Request) -> bool:
        refused, pool = self._refused, self._book.cache.pool
        if refused is None or refused.request is not request:
            return False
        if (refused.num_releases, refused.num_changes) != (
            pool.num_releases,
            self._book.num_changes,
        ):
            return False
        return refused.missing_hash is None or not pool.is_cached(refused.missing_hash)

    def _hash_that_makes_short(self, request: Request) -> BlockHash | None:
        """The block that must be cached for this long prompt to be a short one; None: no block.

        Where that one is cached and one before it is not, it is the one before.
        """
        cache, max_num_tokens = self._book.cache, _num_tokens_to_hit(request)
        num_blocks = cache.num_blocks_for(
            self._limits.num_tokens_that_make_short(request.num_tokens)
        )
        if num_blocks * cache.block_size > max_num_tokens:
            return None
        last = cache.missing_hash(request, num_blocks - 1, max_num_tokens)
        if last is None or not cache.pool.is_cached(last):
            return last
        num_hits = len(cache.find_prefix(request, max_num_tokens))
        return cache.missing_hash(request, num_hits, max_num_tokens)


def _num_tokens_to_hit(request: Request) -> int:
    """How many of its tokens may come from the cache."""
    wants_prompt_logprobs = request.spec.sampling.prompt_logprobs is not None
    if wants_prompt_logprobs and request.num_prompt_logprobs < request.num_prompt_tokens:
        return 0  # only computing a token tells its logprob
    return request.num_tokens - 1
