"""Token masks of the rows whose output follows a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from time import thread_time

import numpy as np

from baton.core.errors import InvalidRequest
from baton.core.ids import RequestId
from baton.core.output import Failure, FailureCause
from baton.core.structured_outputs import FIELD
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.structured_output.grammar import Bits, Grammar, Matcher, num_words

MAX_STEP_S = 0.05
# Rows below this are never refused: an unambiguous grammar takes about 20 µs, at worst 2 ms once.
EXEMPT_S = 0.002
# Weight of the newest step in a row's average, so that a single slow step does not end a row.
NEWEST_WEIGHT = 0.25
# A matcher replays the outputs of another node in one step, in chunks of this size.
REPLAY_CHUNK_TOKENS = 32
MAX_REPLAY_S, MAX_REPLAY_TOKEN_S = 0.25, 0.0005


@dataclass(slots=True)
class _MatcherState:
    """A row's matcher and the number of outputs that it has consumed."""

    matcher: Matcher
    num_consumed: int = 0  # outputs, without drafts
    drafted: list[int] = field(default_factory=list)  # drafts of this step that it has consumed

    def settle_drafts(self, outputs: list[int]) -> int:
        """Roll back the drafts that were rejected. Returns the number of the accepted ones."""
        pairs = zip(self.drafted, outputs, strict=False)
        num_accepted = sum(1 for _ in takewhile(_are_equal, pairs))
        if num_accepted < len(self.drafted):
            self.matcher.rollback(len(self.drafted) - num_accepted)
        self.drafted = []
        self.num_consumed += num_accepted
        return num_accepted


class GrammarMasks:
    """Advances grammar matchers and fills token masks for a batch.

    A row's matcher is created when the row is first sampled and then consumes the outputs that it
    lacks. So it consumes each token once, whether this runner sampled it or another node did.
    It also consumes drafts, for the masks of the places after them, and goes back over those that
    are rejected in the next step.
    A row whose grammar exceeds the time budget for masks is refused, with the reason.
    """

    def __init__(self, vocab_size: int, clock: Callable[[], float] = thread_time) -> None:
        self._vocab_size = vocab_size
        self._clock = clock  # thread CPU time, so that work of other threads does not count
        self._budget = MaskBudget()
        self._states: dict[RequestId, _MatcherState] = {}

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            if self._states.pop(request_id, None) is not None:
                self._budget.forget(request_id)

    def apply_masks(
        self, runs: list[TokenRun], failures: dict[RequestId, Failure]
    ) -> list[TokenRun]:
        """Return the runs with their masks. Adds rows that must end to `failures`."""
        masked = {
            index: run.row.grammar for index, run in enumerate(runs) if run.row.grammar is not None
        }
        first: dict[RequestId, TokenRun] = {}
        has_mask: dict[int, bool] = {}
        if not masked:
            return runs
        too_costly = self._budget.begin_step([runs[index].row.request_id for index in masked])
        for request_id, reason in too_costly.items():
            failures.setdefault(request_id, _request_failure(_too_ambiguous(reason)))
        bits = np.zeros((len(masked), num_words(self._vocab_size)), dtype=np.int32)
        for row, (index, grammar) in enumerate(masked.items()):
            request_id = runs[index].row.request_id
            if request_id in failures:
                continue
            newest = first.setdefault(request_id, runs[index])
            try:
                if newest is runs[index]:
                    self._fill_mask(newest, grammar, bits[row])
                    has_mask[index] = True
                else:
                    has_mask[index] = self._fill_after_draft(runs[index], newest, bits[row])
            except InvalidRequest as error:
                failures[request_id] = _request_failure(error)
        for row, index in enumerate(masked):
            if runs[index].row.request_id not in failures and has_mask[index]:
                runs[index] = runs[index]._replace(allowed=bits[row])
        return runs

    def mask_after(self, run: TokenRun, newest: TokenRun) -> Bits | None:
        """Return the mask of the place after drafts that are being made, one call for each.

        `newest` ends with the newest known token, and `run` with the drafts after it. Returns None
        if the grammar does not allow them.
        """
        bits = np.zeros(num_words(self._vocab_size), dtype=np.int32)
        grammar = newest.row.grammar
        assert grammar is not None
        try:
            if run.end == newest.end:
                self._fill_mask(newest, grammar, bits)
            elif not self._fill_after_draft(run, newest, bits):
                return None
        except InvalidRequest:  # the pass reports it
            return None
        return bits

    def _fill_mask(self, run: TokenRun, grammar: Grammar, bits: Bits) -> None:
        request_id = run.row.request_id
        if request_id not in self._states:
            self._states[request_id] = _MatcherState(grammar.matcher())
        state = self._states[request_id]
        new = run.known_tokens[run.row.num_prompt_tokens + state.num_consumed :].tolist()
        new = new[state.settle_drafts(new) :]
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

    def _fill_after_draft(self, run: TokenRun, newest: TokenRun, bits: Bits) -> bool:
        """Fill the mask of the place after a drafted token, and after those before it.

        Returns False if the grammar does not allow the drafts: the place before them has a mask,
        so that they are rejected, and what is sampled here is dropped.
        """
        request_id = run.row.request_id
        state = self._states[request_id]
        draft = run.known_tokens[newest.end :].tolist()
        if len(state.drafted) < len(draft) - 1:
            return False
        began_s = self._clock()
        is_allowed = state.matcher.try_advance(draft[-1])
        if is_allowed:
            state.drafted.append(draft[-1])
            state.matcher.fill(bits)
        self._budget.note_step(request_id, self._clock() - began_s)
        return is_allowed

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


class MaskBudget:
    """Moving average of each row's mask time, and the rows that exceed the budget of a step. Pure.

    All rows of a batch wait while one row's mask is computed. The cost of an ambiguous grammar
    (`s: s s | "a"`) grows with every token, because the matcher keeps all parses of the text.
    """

    def __init__(self) -> None:
        self._average_s: dict[RequestId, float] = {}
        self._replay_s = 0.0  # in this step

    def begin_step(self, request_ids: Sequence[RequestId]) -> dict[RequestId, str]:
        """Return the rows that must end so that the others fit the budget, with the reasons.

        The costliest rows end first.
        """
        self._replay_s = 0.0
        costs_s = {row: self._average_s.get(row, 0.0) for row in request_ids}
        total_s = sum(costs_s.values())
        refused: dict[RequestId, str] = {}
        for request_id in sorted(costs_s, key=costs_s.__getitem__, reverse=True):
            cost_s = costs_s[request_id]
            if total_s <= MAX_STEP_S or cost_s <= EXEMPT_S:
                break
            refused[request_id] = (
                f"its token mask takes {cost_s * 1e3:.0f} ms of each step; the limit is "
                f"{MAX_STEP_S * 1e3:.0f} ms for the masks of all requests together"
            )
            total_s -= cost_s
        return refused

    def note_step(self, request_id: RequestId, cost_s: float) -> None:
        before_s = self._average_s.get(request_id, 0.0)
        self._average_s[request_id] = before_s + NEWEST_WEIGHT * (cost_s - before_s)

    def note_replay(self, cost_s: float, num_tokens: int, row_s: float) -> str | None:
        """Record a chunk of a row's replay that took `cost_s`.

        The row has now replayed `num_tokens` in `row_s`. Returns the reason if it must end.
        """
        self._replay_s += cost_s
        if self._replay_s <= MAX_REPLAY_S or row_s <= num_tokens * MAX_REPLAY_TOKEN_S:
            return None
        return f"parsing {num_tokens} tokens generated earlier took {row_s * 1e3:.0f} ms"

    def forget(self, request_id: RequestId) -> None:
        self._average_s.pop(request_id, None)


def _are_equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def _request_failure(error: InvalidRequest) -> Failure:
    return Failure(str(error), FailureCause.REQUEST)


def _too_ambiguous(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{FIELD} is too ambiguous: {reason}; write a grammar that parses each text in one way, "
        'such as `s: s "a" | "a"` instead of `s: s s | "a"`',
        FIELD,
    )
