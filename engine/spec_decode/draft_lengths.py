"""Number of tokens to draft for each sequence of a step, from what is measured. Pure.

A step with drafts takes longer and yields more tokens. The most tokens per second are expected from
the acceptance so far, by sequence and position, and from the time of passes by their number of
rows. What is chosen changes no answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from baton.core.ids import RequestId
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import DraftRow

# Whether drafts are accepted depends on the text if they are looked up, and on the model if one
# makes them: other sequences then count as this many drafts of a new one.
PRIOR_OF_MODELS = 8.0
# Drafts in a row of which nothing is accepted, before a sequence pauses, if they are looked up.
NUM_FREE_FAILURES = 3
MAX_PAUSE_STEPS = 16
# Looking costs some 0.1 ms. A text that is predictable again loses little by these steps.
MAX_IDLE_STEPS = 64
STEPS_PER_ACCEPTED = 16
IDLE_INTERVAL = 4
EXPECTED_RATE = 0.7  # of a node's first drafts, and of those from a client's prediction
MIN_EXPECTED_RATE = 0.2  # of other new sequences, however little was accepted of those before
SEQUENCE_KEEPS = 0.95  # of its drafts, per step
NODE_KEEPS = 0.998
# Gain from which drafting begins; it goes on while there is any. Times and rates are not exact.
MIN_GAIN_TO_BEGIN = 1.05
# Drafts below this probability are not worth being considered.
MIN_REACHED = 0.05
# Of a rate, expected at the next position: few drafts reach the last ones.
CARRIED = 0.95
MAX_WEIGHT = 1e100
# Share of a new time in the mean of its number of rows. Load on the machine makes times vary.
NEW_SHARE = 0.1
# A time that is far off counts as if it were this much above the mean: a stall is no cost of rows.
MAX_RATIO = 1.5
# Relative change of a mean that is left out of the table of all: making it takes a while.
MAX_DEVIATION = 0.02
# Passes after which a time that was not measured again is forgotten: contexts grow, load changes.
MAX_AGE_PASSES = 1024
# Cost of a row more, relative to a pass, where nothing is known. It is little, so that it is tried.
ASSUMED_SLOPE = 0.03


class DraftLengths:
    def __init__(self, speculation: Speculation) -> None:
        self._first = [EXPECTED_RATE] * speculation.num_tokens
        self._looks_up = speculation.looks_up
        self._costs = PassCosts(speculation.max_rows)
        self._node = AcceptanceRates(speculation.num_tokens, NODE_KEEPS)
        self._records: dict[RequestId, _SequenceRecord] = {}
        self._is_drafting = False
        self._num_steps = 0
        self._num_idle = 0  # steps, less those that accepted tokens make up for

    def begin_step(self) -> bool:
        """Return whether to look for drafts in this step: now and then, if none are accepted."""
        self._num_steps += 1
        self._num_idle = min(self._num_idle + 1, MAX_IDLE_STEPS + STEPS_PER_ACCEPTED)
        return self._num_idle <= MAX_IDLE_STEPS or not self._num_steps % IDLE_INTERVAL

    def without_pausing(self, rows: Iterable[DraftRow]) -> list[DraftRow]:
        """Return the rows that may get drafts, with one token at most after failures."""
        records, awake = self._records, []
        for row in rows:
            record = records.get(row.request_id)
            if record is None:
                record = records[row.request_id] = self._make_record()
            max_tokens = record.begin_step(row.max_tokens)
            if not self._looks_up:
                awake.append(row)
            elif max_tokens:
                awake.append(row if max_tokens == row.max_tokens else row._replace(max_tokens=1))
        return awake

    def choose(
        self, rows: Iterable[DraftRow], num_scheduled: Collection[int], max_tokens: int
    ) -> list[DraftRow]:
        """Return those of the rows that get drafts, with the most tokens of each.

        `rows` do not pause. `num_scheduled` are the tokens of all rows of the step, without drafts.
        """
        self._node.end_step()
        usual = [max(MIN_EXPECTED_RATE, each) for each in self._node.rates(self._first)]
        reached = [(each, row) for row in rows for each in self._reached(row, usual)]
        # In a stable order: of a row, no token comes before those in front of it.
        reached.sort(key=lambda each: -each[0])
        number = self._best_number([each for each, _ in reached[:max_tokens]], num_scheduled)
        counts: dict[RequestId, int] = {}
        chosen: dict[RequestId, DraftRow] = {}
        for _, row in reached[:number]:
            counts[row.request_id] = counts.get(row.request_id, 0) + 1
            chosen[row.request_id] = row
        return [row._replace(max_tokens=counts[name]) for name, row in chosen.items()]

    def note_accepted(self, request_id: RequestId, num_proposed: int, num_accepted: int) -> None:
        self._node.note_draft(num_proposed, num_accepted)
        self._num_idle = max(0, self._num_idle - STEPS_PER_ACCEPTED * num_accepted)
        record = self._records.get(request_id)
        if record is not None:
            record.note_accepted(num_proposed, num_accepted)

    def note_pass(self, num_rows: int, took_s: float) -> None:
        """Learn the time of a pass in which each row computes one token."""
        self._costs.note_pass(num_rows, took_s)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._records.pop(request_id, None)

    def _make_record(self) -> _SequenceRecord:
        number = len(self._first)
        if self._looks_up:
            return _SequenceRecord(AcceptanceRates(number, SEQUENCE_KEEPS))
        return _SequenceRecord(AcceptanceRates(number, SEQUENCE_KEEPS, PRIOR_OF_MODELS, 0.0))

    def _reached(self, row: DraftRow, usual: Sequence[float]) -> list[float]:
        """Return the probabilities that the tokens of a draft are accepted."""
        rates = self._records[row.request_id].rates
        reached: list[float] = []
        probability = 1.0
        for rate in rates.rates(
            (self._first if row.predicted_token_ids else usual)[: row.max_tokens]
        ):
            probability *= rate
            if probability < MIN_REACHED:
                break
            reached.append(probability)
        return reached

    def _best_number(self, reached: Sequence[float], num_scheduled: Collection[int]) -> int:
        """Return the number of drafted tokens with which the step yields most per second."""
        if not reached:
            return 0
        num_tokens, num_computed = float(len(num_scheduled)), sum(num_scheduled)
        costs = self._costs.by_num_rows()
        plain = num_tokens / costs[num_computed]
        best, best_number = 0.0, 0
        for number, probability in enumerate(reached, start=1):
            num_tokens += probability
            rate = num_tokens / costs[num_computed + number]
            if rate > best:
                best, best_number = rate, number
        self._is_drafting = best > plain * (1.0 if self._is_drafting else MIN_GAIN_TO_BEGIN)
        return best_number if self._is_drafting else 0


class _SequenceRecord:
    """Results of the drafts of one sequence."""

    def __init__(self, rates: AcceptanceRates) -> None:
        self.rates = rates
        self._num_failures = 0  # in a row
        self._pause = 0  # steps left without drafts

    def begin_step(self, max_tokens: int) -> int:
        """Return how many tokens may be drafted in this step."""
        self.rates.end_step()
        if self._pause:
            self._pause -= 1
            return 0
        return min(max_tokens, 1) if self._num_failures > NUM_FREE_FAILURES else max_tokens

    def note_accepted(self, num_proposed: int, num_accepted: int) -> None:
        """Pause, if no token was accepted several times, for ever more steps."""
        self.rates.note_draft(num_proposed, num_accepted)
        self._num_failures = 0 if num_accepted else self._num_failures + 1
        if self._num_failures > NUM_FREE_FAILURES:
            self._pause = min(MAX_PAUSE_STEPS, 2 ** (self._num_failures - NUM_FREE_FAILURES))


class AcceptanceRates:
    """Rates at which a token is accepted if all before it were. Old drafts count ever less."""

    def __init__(
        self,
        num_positions: int,
        kept_per_step: float,
        prior: float = 1.0,
        carried: float = CARRIED,
    ) -> None:
        """`prior` is the number of drafts that the expected rates count as."""
        self._kept = kept_per_step
        self._prior, self._carried = prior, carried
        self._weight = 1.0  # of a draft now: it grows, instead of the sums being reduced
        self._tested = [0.0] * num_positions
        self._accepted = [0.0] * num_positions

    def note_draft(self, num_proposed: int, num_accepted: int) -> None:
        for position in range(min(num_accepted + 1, num_proposed)):
            self._tested[position] += self._weight
            if position < num_accepted:
                self._accepted[position] += self._weight

    def end_step(self) -> None:
        self._weight /= self._kept
        if self._weight > MAX_WEIGHT:
            self._tested = [each / self._weight for each in self._tested]
            self._accepted = [each / self._weight for each in self._accepted]
            self._weight = 1.0

    def rates(self, expected: Sequence[float]) -> list[float]:
        """Return the rates of the first positions.

        The expected ones are mixed in, or those of the position before if they are higher.
        """
        weight, rate = self._weight * self._prior, 0.0
        rates: list[float] = []
        for accepted, tested, each in zip(self._accepted, self._tested, expected, strict=False):
            rate = (accepted + weight * max(each, self._carried * rate)) / (tested + weight)
            rates.append(rate)
        return rates


class PassCosts:
    """Mean times of decoding passes. Numbers of rows that were not measured are interpolated."""

    def __init__(self, max_rows: int) -> None:
        self._mean_s: list[float | None] = [None] * (max_rows + 1)  # by number of rows
        self._measured_at = [0] * (max_rows + 1)
        self._num_passes = 0
        self._table: Sequence[float] | None = None  # of all numbers; None: it must be made again

    def note_pass(self, num_rows: int, took_s: float) -> None:
        if not 1 <= num_rows < len(self._mean_s) or took_s <= 0:
            return
        mean_s = self._mean_s[num_rows]
        if mean_s is None:
            mean_s = took_s
        mean_s += NEW_SHARE * (min(took_s, MAX_RATIO * mean_s) - mean_s)
        if self._mean_s[num_rows] is None or self._is_far_off(num_rows, mean_s):
            self._table = None
        self._mean_s[num_rows] = mean_s
        self._measured_at[num_rows] = self._num_passes
        self._num_passes += 1
        if not self._num_passes % MAX_AGE_PASSES:
            self._forget_old()

    def by_num_rows(self) -> Sequence[float]:
        """Return the expected times, in seconds or, before the first pass, in any unit."""
        if self._table is None:
            self._table = self._interpolated()
        return self._table

    def _is_far_off(self, num_rows: int, mean_s: float) -> bool:
        if self._table is None:
            return True
        return abs(mean_s - self._table[num_rows]) > MAX_DEVIATION * mean_s

    def _interpolated(self) -> list[float]:
        costs = [1.0 + ASSUMED_SLOPE * num_rows for num_rows in range(len(self._mean_s))]
        known = [(rows, mean_s) for rows, mean_s in enumerate(self._mean_s) if mean_s is not None]
        if not known:
            return costs
        (lowest, low_s), (highest, high_s) = known[0], known[-1]
        below, above = low_s / costs[lowest], high_s / costs[highest]
        for num_rows in range(lowest):
            costs[num_rows] *= below
        for num_rows in range(highest + 1, len(costs)):
            costs[num_rows] *= above
        for (fewer, fewer_s), (more, more_s) in pairwise(known):
            for num_rows in range(fewer, more):
                share = (num_rows - fewer) / (more - fewer)
                costs[num_rows] = fewer_s + share * (more_s - fewer_s)
        costs[highest] = high_s
        return costs

    def _forget_old(self) -> None:
        for num_rows, measured_at in enumerate(self._measured_at):
            if measured_at < self._num_passes - MAX_AGE_PASSES:
                self._mean_s[num_rows] = None
        self._table = None
