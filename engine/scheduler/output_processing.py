"""Output processing, the second half of a step: apply sampled tokens and KV reports."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import HandoffId
from baton.core.output import Failure, FailureCause, FinishReason, FirstToken, Output, TokenLogprobs
from baton.engine.errors import OutOfOrder
from baton.engine.plan import RunResult
from baton.engine.scheduler.config import LoadFailurePolicy
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.running_batch import PlannedStep
from baton.engine.scheduler.state import SchedulerState
from baton.kv_transfer.types import NO_REPORTS, KvReports, Landed, Lost


class OutputProcessor:
    """Applies the results of a step to the requests and collects their outputs."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def settle_run(self, step: PlannedStep, run: RunResult) -> None:
        """Apply the result of a step, which is not pending any more."""
        if step.ended:
            run = run.without(step.ended)
        if len(run.token_ids) + len(run.failures) < step.num_decodes - len(step.ended):
            raise OutOfOrder(f"{step.num_decodes} requests decode; the run has fewer results")
        for request, num_tokens in step.chunks:
            if step.num_tokens_of(request) and request.request_id not in run.failures:
                self._advance_prefill(request, num_tokens, run)
        running = self._state.batch.running
        for request_id, failure in run.failures.items():
            self._end_failed_run(running[request_id], failure)
        if run.num_proposed:
            self._count_draft_tokens(run)
        for held in step.written:
            self._state.cache.release(held)
        self._state.cache.end_pass()  # before requests end with their last token
        if self._state.media is not None:
            self._state.media.end_pass()
        self._append_tokens(run)
        self._end_pooled(run)

    def settle_kv(self, reports: KvReports) -> None:
        if reports == NO_REPORTS:
            return
        arrivals, now_s = self._state.arrivals, self._state.now_s
        ended = arrivals.settle_fills(reports, now_s)
        self._state.stop_waiting_for(ended)
        for landed in reports.finished_recving:
            self._process_landed(landed)
        for proved in reports.proved:
            arrivals.receives.cache_proved(proved)
        for lost in reports.failed_recving:
            self._process_lost(lost)
        for handoff_id in reports.released:
            arrivals.receives.end(handoff_id)
        for handoff_id in reports.granted:
            self._state.note_grant(handoff_id)
        for handoff_id in reports.finished_sending:
            self._state.end_handoff(handoff_id)
        # Last: what has just landed, or been released, can be given to peers at once.
        arrivals.settle_gives(reports, ended, now_s)

    # --- the run ------------------------------------------------------------------

    def _advance_prefill(self, request: Request, num_tokens: int, run: RunResult) -> None:
        """Advance a prefill by `num_tokens`."""
        start = request.kv.num_computed_tokens
        request.kv.num_computed_tokens += num_tokens
        request.num_prefilled_tokens += num_tokens
        self._state.cache.end_chunk(request.kv)
        is_complete = request.kv.num_computed_tokens == request.num_tokens
        results = run.vectors if request.submitted.task.is_pooling else run.token_ids
        if is_complete and request.request_id not in results:
            raise OutOfOrder(f"the prefill of {request.request_id} is complete; it got no token")
        num_whole = request.kv.num_computed_tokens // self._state.cache.block_size
        # The last block, full or not, is final: a sender ends with its first token.
        num_blocks = request.kv.num_blocks if is_complete else num_whole
        self._state.arrivals.sends.send(request.submitted.send_to, request.kv, num_blocks)
        self._state.cache.release_unseen(request.kv)
        prompt_logprobs = run.prompt_logprobs.get(request.request_id)
        if prompt_logprobs:
            self._emit_prompt_logprobs(request, start, prompt_logprobs)

    def _emit_prompt_logprobs(
        self, request: Request, start: int, logprobs: list[TokenLogprobs | None]
    ) -> None:
        # A resumed request computes tokens again whose logprobs were already returned.
        fresh = tuple(logprobs[max(0, request.num_prompt_logprobs - start) :])
        if fresh:
            output = Output(
                request.request_id,
                request.num_output_tokens,
                registration=request.registration,
                prompt_logprobs=fresh,
                first_prompt_index=request.num_prompt_logprobs,
            )
            self._state.outbox.append(output)
        request.num_prompt_logprobs += len(fresh)

    def _count_draft_tokens(self, run: RunResult) -> None:
        """Count speculative tokens. Runs before tokens are applied, which can end a request."""
        state = self._state
        for request_id, num_proposed in run.num_proposed.items():
            num_accepted = max(0, len(run.token_ids.get(request_id, ())) - 1)
            state.total_proposed_tokens += num_proposed
            state.total_accepted_tokens += num_accepted
            _count_positions(state.proposed_by_position, num_proposed)
            _count_positions(state.accepted_by_position, num_accepted)
            request = state.batch.running[request_id]
            request.num_proposed_tokens += num_proposed
            request.num_accepted_tokens += num_accepted

    def _append_tokens(self, run: RunResult) -> None:
        """Append the sampled tokens. The fast path, for nearly all rows, is kept minimal."""
        running = self._state.batch.running
        self._state.total_sampled_tokens += sum(map(len, run.token_ids.values()))
        outbox = self._state.outbox
        for request_id, token_ids in run.token_ids.items():
            request = running[request_id]
            known = request.token_ids
            num_tokens = len(known) + 1
            token_id = token_ids[0]
            if (
                len(token_ids) != 1
                or num_tokens >= request.max_num_tokens
                or token_id in request.stop_token_ids
                or not request.is_plain
            ):
                draft_state = run.draft_states.get(request_id, b"")
                self._accept(request, token_ids, run.logprobs.get(request_id, ()), draft_state)
                continue
            known.append(token_id)
            request.kv.num_computed_tokens = num_tokens - 1
            first_index = num_tokens - 1 - request.num_prompt_tokens
            outbox.append(Output(request_id, first_index, (token_id,), request.registration))

    def _accept(
        self,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        draft_state: bytes = b"",
    ) -> bool:
        """Append tokens, with logprobs, up to a final one. Returns False if the request ends."""
        first_index = request.num_output_tokens
        reason = None
        taken: list[int] = []
        for token_id in token_ids:
            request.token_ids.append(token_id)
            taken.append(token_id)
            reason = self._finish_reason(request, token_id)
            if reason is not None:
                break
        # The KV of the newest token is not computed yet. Later slots, of rejected draft tokens,
        # count as empty and are overwritten.
        request.kv.num_computed_tokens = request.num_tokens - 1
        output = Output(
            request.request_id,
            first_index,
            tuple(taken),
            request.registration,
            tuple(logprobs[: len(taken)]),
            finish_reason=reason,
            stop_token_id=taken[-1] if reason is FinishReason.STOP else None,
            served=None if reason is None else request.served(),
        )
        self._state.outbox.append(output)
        if reason is None:
            return True
        # A sender's first token completes the hand-off even if it ends the request. The decode
        # node then ends the request by the same rule instead of waiting for KV.
        first_token = FirstToken(taken[0], logprobs[0] if logprobs else None, draft_state)
        self._state.arrivals.sends.complete(
            request.submitted.send_to, request.kv.num_context_tokens, first_token
        )
        self._state.finish(request, reason.value)
        return False

    def _end_pooled(self, run: RunResult) -> None:
        """End the requests whose vectors are computed."""
        for request_id, vector in run.vectors.items():
            request = self._state.batch.running[request_id]
            self._state.end(request, FinishReason.STOP, vector=vector)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Return the reason for which the request ends with this newest token, or None."""
        sampling = request.submitted.sampling
        is_stop = token_id in request.stop_token_ids
        # A grammar allows the EOS token only where the answer is complete, and before min_tokens
        # only where no other token can follow.
        is_complete = request.grammar is not None and token_id in self._state.config.eos_token_ids
        if is_complete or (is_stop and request.num_output_tokens >= sampling.min_tokens):
            return FinishReason.STOP
        is_long_enough = request.num_output_tokens >= sampling.max_tokens
        if is_long_enough or request.num_tokens >= self._state.config.max_model_len:
            return FinishReason.LENGTH
        return FinishReason.HANDED_OFF if request.submitted.send_to is not None else None

    def _end_failed_run(self, request: Request, failure: Failure) -> None:
        """End a request whose row failed. Its KV may be wrong, unless the request is at fault."""
        if failure.cause is not FailureCause.REQUEST:
            self._state.arrivals.gives.withdraw(request.kv.block_ids)
            self._state.cache.uncache_blocks(request.kv)
            self._state.arrivals.stores.drop(request.kv)
            if request.media is not None and self._state.media is not None:
                self._state.media.drop(request.media)
        self._state.end(request, FinishReason.ERROR, failure)

    # --- KV reports ---------------------------------------------------------------

    def _process_landed(self, landed: Landed) -> None:
        """Make the receiver of a completed hand-off ready. Applies the first token it carries."""
        request = self._receiver_of(landed.handoff_id)
        if request is not None:
            # Even if the request ends now, no revoke may follow for a hand-off that is over.
            self._state.end_receive(request)
        self._state.arrivals.receives.end(landed.handoff_id)
        if request is None:
            return
        first_token = landed.first_token
        reason = self._mismatch(landed.num_tokens, first_token, request)
        if first_token is None or reason is not None:
            self._recover_from_lost_kv(request, reason or "it came without the first token")
            return
        request.num_received_tokens = request.num_tokens - request.kv.num_computed_tokens
        request.kv.num_computed_tokens = request.num_tokens
        self._state.cache.register(request.kv)
        logprobs = () if first_token.logprobs is None else (first_token.logprobs,)
        if self._accept(request, (first_token.token_id,), logprobs):
            request.draft_state = first_token.draft_state
            self._state.make_ready(request)

    def _receiver_of(self, handoff_id: HandoffId) -> Request | None:
        """Return the request that waits for this hand-off, if it still does."""
        arrival = self._state.arrivals.receives.receiver_of(handoff_id)
        return None if arrival is None else self._state.requests[arrival.kv.request_id]

    def _mismatch(
        self, num_tokens: int, first_token: FirstToken | None, request: Request
    ) -> str | None:
        """Return an error if the peer's report does not match the request, else None."""
        if num_tokens != request.num_tokens:
            return f"KV of {num_tokens} tokens arrived for {request.num_tokens} tokens"
        vocab_size = self._state.config.vocab_size
        if first_token and vocab_size is not None and first_token.token_id >= vocab_size:
            return f"token {first_token.token_id} arrived; the vocabulary has {vocab_size}"
        return None

    def _process_lost(self, lost: Lost) -> None:
        """Recover from lost KV. The hand-off keeps its blocks until their release is reported."""
        request = self._receiver_of(lost.handoff_id)
        if request is not None:
            self._state.end_receive(request)
            self._recover_from_lost_kv(request, lost.reason)

    def _recover_from_lost_kv(self, request: Request, reason: str) -> None:
        if self._state.config.kv_load_failure_policy is LoadFailurePolicy.FAIL:
            reason = f"the KV of the prompt was lost: {reason}"
            self._state.end(request, FinishReason.ERROR, Failure(reason, FailureCause.KV_LOST))
        else:
            self._state.restart(request)


def _count_positions(counts: list[int], num_tokens: int) -> None:
    """Count the first positions of a draft."""
    counts += [0] * (num_tokens - len(counts))
    for position in range(num_tokens):
        counts[position] += 1
