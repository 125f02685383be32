"""Which tokens the grammars of a batch's rows let come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.grammar import Bits, Grammar, Matcher
from engine.plan import Plan
from engine.request import RequestId
from engine.runner.batch import RowFacts
from engine.runner.sampler import SampleRow

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
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: dict[RequestId, _Place] = {}

    def apply(self, plan: Plan) -> None:
        for request_id in plan.dropped:
            self._places.pop(request_id, None)
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
        num_words = -(-self._vocab_size // BITS_PER_WORD)
        bits = np.zeros((len(ruled), num_words), dtype=np.int32)
        for line, place in enumerate(ruled):
            row = rows[place]
            try:
                self._look(self._places[row.request_id], asked[place], bits[line])
            except InvalidRequest as refusal:
                refusals[row.request_id] = str(refusal)
        allowed = unpacked(bits, self._vocab_size)
        for line, place in enumerate(ruled):
            if rows[place].request_id not in refusals:
                asked[place] = asked[place]._replace(allowed=allowed[line])
        return asked

    def _look(self, place: _Place, row: SampleRow, bits: Bits) -> None:
        if place.matcher is None:
            place.matcher = place.grammar.matcher()
        new = row.known_tokens[row.num_prompt_tokens + place.num_taken :].tolist()
        if new:
            place.matcher.advance(new)
            place.num_taken += len(new)
        place.matcher.fill(bits)


def unpacked(bits: Bits, vocab_size: int) -> Tensor:
    """bits: [rows, words]; [rows, vocab_size] booleans."""
    flags = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(flags[:, :vocab_size].view(np.bool_))
