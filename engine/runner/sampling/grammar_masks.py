"""Token masks of the rows whose output follows a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time

import numpy as np
import torch
from torch import Tensor

from engine.plan import Plan
from engine.request import RequestId
from engine.runner.input_batch import BatchRow
from engine.runner.sampling.constraints import SampleRow
from engine.runner.sampling.mask_budget import REPLAY_CHUNK_TOKENS, MaskBudget
from engine.structured_output.grammar import Bits, Grammar, Matcher
from engine.structured_output.params import FIELD
from errors import InvalidRequest

BITS_PER_WORD = 32


@dataclass(slots=True)
class _MatcherState:
    """A row's matcher and the number of outputs that it has consumed."""

    grammar: Grammar
    matcher: Matcher | None = None  # None before the row is first sampled
    num_consumed: int = 0  # outputs


class GrammarMasks:
    """Advances grammar matchers and fills token masks for a batch.

    A row's matcher is created when the row is first sampled and then consumes the outputs that it
    lacks. So it consumes each token once, whether this runner sampled it or another node did.
    A row whose grammar exceeds the time budget for masks is refused, with the reason.
    """

    def __init__(self, vocab_size: int, clock: Callable[[], float] = thread_time) -> None:
        self._vocab_size = vocab_size
        self._clock = clock  # thread CPU time, so that work of other threads does not count
        self._budget = MaskBudget()
        self._states: dict[RequestId, _MatcherState] = {}

    def apply(self, plan: Plan) -> None:
        for request_id in plan.dropped:
            if self._states.pop(request_id, None) is not None:
                self._budget.forget(request_id)
        for row in plan.started:
            if row.grammar is not None:
                self._states[row.request_id] = _MatcherState(row.grammar)

    def applied(
        self,
        rows: Sequence[BatchRow],
        sample_rows: list[SampleRow],
        refusals: dict[RequestId, str],
    ) -> list[SampleRow]:
        """Return `sample_rows` with their masks. Adds rows that must end to `refusals`."""
        if not self._states:
            return sample_rows
        masked = [index for index, row in enumerate(rows) if row.request_id in self._states]
        if not masked:
            return sample_rows
        refusals.update(self._refuse_too_costly([rows[index].request_id for index in masked]))
        num_words = -(-self._vocab_size // BITS_PER_WORD)
        bits = np.zeros((len(masked), num_words), dtype=np.int32)
        for line, index in enumerate(masked):
            row = rows[index]
            if row.request_id in refusals:
                continue
            try:
                self._fill_mask(row.request_id, sample_rows[index], bits[line])
            except InvalidRequest as refusal:
                refusals[row.request_id] = str(refusal)
        allowed = unpacked(bits, self._vocab_size)
        for line, index in enumerate(masked):
            if rows[index].request_id not in refusals:
                sample_rows[index] = sample_rows[index]._replace(allowed=allowed[line])
        return sample_rows

    def _refuse_too_costly(self, request_ids: list[RequestId]) -> dict[RequestId, str]:
        reasons = self._budget.begin_step(request_ids)
        return {request_id: str(_too_ambiguous(why)) for request_id, why in reasons.items()}

    def _fill_mask(self, request_id: RequestId, row: SampleRow, bits: Bits) -> None:
        state = self._states[request_id]
        if state.matcher is None:
            state.matcher = state.grammar.matcher()
        new = row.known_tokens[row.num_prompt_tokens + state.num_consumed :].tolist()
        if len(new) > 1:
            self._replay(state.matcher, new)
            state.num_consumed += len(new)
            new = []
        began_s = self._clock()
        if new:
            state.matcher.advance(new)
            state.num_consumed += 1
        state.matcher.fill(bits)
        self._budget.note_step(request_id, self._clock() - began_s)

    def _replay(self, matcher: Matcher, tokens: list[int]) -> None:
        """Advance a matcher over outputs of another node, or of before a preemption."""
        began_s = before_s = self._clock()
        for start in range(0, len(tokens), REPLAY_CHUNK_TOKENS):
            chunk = tokens[start : start + REPLAY_CHUNK_TOKENS]
            matcher.advance(chunk)
            now_s = self._clock()
            num_read = start + len(chunk)
            reason = self._budget.note_replay(now_s - before_s, num_read, now_s - began_s)
            if reason is not None:
                raise _too_ambiguous(reason)
            before_s = now_s


def _too_ambiguous(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{FIELD} is too ambiguous: {reason}; write a grammar that parses each text in one way, "
        'such as `s: s "a" | "a"` instead of `s: s s | "a"`',
        FIELD,
    )


def unpacked(bits: Bits, vocab_size: int) -> Tensor:
    """Unpack bit masks, [rows, words], into booleans, [rows, vocab_size]."""
    flags = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(flags[:, :vocab_size].view(np.bool_))
