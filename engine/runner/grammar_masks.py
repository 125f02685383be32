"""Which tokens the grammars of a batch's rows let come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import thread_time

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.grammar import Bits, Grammar, Matcher
from engine.plan import Plan
from engine.request import RequestId
from engine.runner.batch import RowFacts
from engine.runner.mask_budget import READ_AT_ONCE, MaskBudget
from engine.runner.sampler import SampleRow
from engine.structured_outputs import FIELD

BITS_PER_WORD = 32


@dataclass(slots=True)
class _Place:
    """How far a row's answer has been followed."""

    grammar: Grammar
    matcher: Matcher | None = None  # None: it was not sampled yet
    num_taken: int = 0  # of its outputs


class GrammarMasks:
    """A row's matcher is made when it is first sampled, and told the outputs that it lacks.

    So each token is taken once, whoever sampled it: this runner, a peer, or a node that is gone.
    A row whose grammar takes more than its share of the time for masks ends by name.
    """

    def __init__(self, vocab_size: int, clock: Callable[[], float] = thread_time) -> None:
        self._vocab_size = vocab_size
        self._clock = clock  # of processor time: other threads' work is no fault of a grammar
        self._budget = MaskBudget()
        self._places: dict[RequestId, _Place] = {}

    def apply(self, plan: Plan) -> None:
        for request_id in plan.dropped:
            if self._places.pop(request_id, None) is not None:
                self._budget.forget(request_id)
        for row in plan.started:
            if row.grammar is not None:
                self._places[row.request_id] = _Place(row.grammar)

    def applied(
        self, rows: Sequence[RowFacts], asked: list[SampleRow], refusals: dict[RequestId, str]
    ) -> list[SampleRow]:
        """`asked` with what is allowed. Rows that cannot be followed are told in `refusals`."""
        if not self._places:
            return asked
        ruled = [place for place, row in enumerate(rows) if row.request_id in self._places]
        if not ruled:
            return asked
        refusals.update(self._too_costly([rows[place].request_id for place in ruled]))
        num_words = -(-self._vocab_size // BITS_PER_WORD)
        bits = np.zeros((len(ruled), num_words), dtype=np.int32)
        for line, place in enumerate(ruled):
            row = rows[place]
            if row.request_id in refusals:
                continue
            try:
                self._look(row.request_id, asked[place], bits[line])
            except InvalidRequest as refusal:
                refusals[row.request_id] = str(refusal)
        allowed = unpacked(bits, self._vocab_size)
        for line, place in enumerate(ruled):
            if rows[place].request_id not in refusals:
                asked[place] = asked[place]._replace(allowed=allowed[line])
        return asked

    def _too_costly(self, ruled: list[RequestId]) -> dict[RequestId, str]:
        refused = self._budget.begin_step(ruled)
        return {request_id: str(_too_ambiguous(why)) for request_id, why in refused.items()}

    def _look(self, request_id: RequestId, row: SampleRow, bits: Bits) -> None:
        place = self._places[request_id]
        if place.matcher is None:
            place.matcher = place.grammar.matcher()
        new = row.known_tokens[row.num_prompt_tokens + place.num_taken :].tolist()
        if len(new) > 1:
            self._read(place.matcher, new)
            place.num_taken += len(new)
            new = []
        began_s = self._clock()
        if new:
            place.matcher.advance(new)
            place.num_taken += 1
        place.matcher.fill(bits)
        self._budget.note_step(request_id, self._clock() - began_s)

    def _read(self, matcher: Matcher, tokens: list[int]) -> None:
        """Tokens that were written elsewhere, or before a preemption."""
        began_s = before_s = self._clock()
        for start in range(0, len(tokens), READ_AT_ONCE):
            some = tokens[start : start + READ_AT_ONCE]
            matcher.advance(some)
            now_s = self._clock()
            num_read = start + len(some)
            reason = self._budget.note_reading(now_s - before_s, num_read, now_s - began_s)
            if reason is not None:
                raise _too_ambiguous(reason)
            before_s = now_s


def _too_ambiguous(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{FIELD} is too ambiguous: {reason}; let a text be read in one way only, such as by "
        '`s: s "a" | "a"` instead of `s: s s | "a"`',
        FIELD,
    )


def unpacked(bits: Bits, vocab_size: int) -> Tensor:
    """bits: [rows, words]; [rows, vocab_size] booleans."""
    flags = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(flags[:, :vocab_size].view(np.bool_))
