"""Time limit on the grammar masks of a step: too costly grammars end their request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.core.ids import RequestId
from baton.core.output import Failure
from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.sampling.grammar_masks import EXEMPT_S, MAX_STEP_S, GrammarMasks
from baton.engine.structured_output.grammar import Bits, Matcher

VOCAB_SIZE = 64
HONEST_S = 0.0001


@dataclass(slots=True)
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class CostlyGrammar:
    """Grammar with given durations per token and per mask."""

    clock: Clock
    mask_s: float = HONEST_S
    token_s: float = 0.0
    taken: list[int] = field(default_factory=list)

    def matcher(self) -> Matcher:
        return self

    def advance(self, token_ids: Sequence[int]) -> None:
        self.clock.now_s += self.token_s * len(token_ids)
        self.taken += token_ids

    def try_advance(self, token_id: int) -> bool:
        self.advance([token_id])
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def fill(self, allowed: Bits) -> None:
        self.clock.now_s += self.mask_s
        allowed.fill(-1)


def a_row(name: str, grammar: CostlyGrammar) -> PlanRow:
    return PlanRow(
        RequestId(name),
        token_ids=(0,),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_tables=((),),
        sampling=SamplingParams(),
        seed=0,
        grammar=grammar,
    )


class Batch:
    """Rows that generate one token per step."""

    def __init__(self, clock: Clock, grammars: dict[str, CostlyGrammar], num_written: int = 0):
        self._clock = clock
        self._masks = GrammarMasks(VOCAB_SIZE, clock)
        self._rows = [a_row(name, grammar) for name, grammar in grammars.items()]
        self._num_written = num_written

    def step(self) -> tuple[dict[RequestId, str], float]:
        """Return the refused requests and the time that the masks took."""
        failures: dict[RequestId, Failure] = {}
        known = np.zeros(1 + self._num_written, dtype=np.int64)
        runs = [TokenRun(row, 0, 1, len(known), known) for row in self._rows]
        began_s = self._clock.now_s
        self._masks.apply_masks(runs, failures)
        self._masks.forget(tuple(failures))
        self._rows = [row for row in self._rows if row.request_id not in failures]
        self._num_written += 1
        refusals = {request_id: failure.reason for request_id, failure in failures.items()}
        return refusals, self._clock.now_s - began_s


def test_a_grammar_slower_than_the_step_limit_fails_with_a_named_error() -> None:
    clock = Clock()
    ambiguous = CostlyGrammar(clock)
    batch = Batch(clock, {"ambiguous": ambiguous, "honest": CostlyGrammar(clock)})
    refused: dict[RequestId, str] = {}
    longest_s = 0.0

    for _ in range(400):
        ambiguous.mask_s += 0.0005
        now_refused, took_s = batch.step()
        refused |= now_refused
        longest_s = max(longest_s, took_s)

    assert refused.keys() == {"ambiguous"}
    assert "too ambiguous" in refused[RequestId("ambiguous")]
    assert longest_s < 1.2 * MAX_STEP_S


def test_many_slow_grammars_together_stay_within_the_step_limit() -> None:
    clock = Clock()
    grammars = {f"r{number}": CostlyGrammar(clock) for number in range(64)}
    batch = Batch(clock, grammars)
    longest_s = 0.0
    refused: set[RequestId] = set()

    for _ in range(400):
        for grammar in grammars.values():
            grammar.mask_s += 0.00005
        now_refused, took_s = batch.step()
        refused |= now_refused.keys()
        longest_s = max(longest_s, took_s)

    assert refused
    assert longest_s < 64 * EXEMPT_S * 1.5


def test_a_single_slow_grammar_step_fails_no_request() -> None:
    clock = Clock()
    grammar = CostlyGrammar(clock)
    batch = Batch(clock, {"r": grammar})
    batch.step()
    grammar.mask_s = 2 * MAX_STEP_S
    batch.step()
    grammar.mask_s = HONEST_S

    assert batch.step()[0] == {}


def test_a_long_migrated_answer_is_matched_completely() -> None:
    clock = Clock()
    grammar = CostlyGrammar(clock, token_s=0.00005)
    batch = Batch(clock, {"r": grammar}, num_written=8000)

    assert batch.step()[0] == {}
    assert len(grammar.taken) == 8000


def test_matching_an_ambiguous_migrated_answer_stops_early() -> None:
    clock = Clock()
    grammar = CostlyGrammar(clock, token_s=0.02)
    batch = Batch(clock, {"r": grammar}, num_written=1000)

    refused, took_s = batch.step()

    assert "too ambiguous" in refused[RequestId("r")]
    assert took_s < 1.0
