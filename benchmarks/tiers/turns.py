"""Order of the turns of a replay of sessions, and the shares of their loads. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

DISTANCE = 3  # long sessions that begin from the first turn of one to its second turn
NUM_SHORT = 3  # short sessions to each long one
WANTED_GAIN = 5.0
TAKEN_SHARE = 0.9  # of the missing whole blocks of a prefix


@dataclass(frozen=True, slots=True)
class Turn:
    session: int
    is_long: bool
    is_second: bool


def turn_order(num_long: int) -> Iterator[Turn]:
    """Yield all turns. The second turn of a session follows the first ones of later sessions.

    Second turns of short sessions come right after the first turn of a long one, while its many
    blocks are being stored.
    """
    for number in range(num_long + DISTANCE):
        old = number - DISTANCE
        if number < num_long:
            yield Turn(number, is_long=True, is_second=False)
        if old >= 0:
            yield from _short(old, is_second=True)
        if number < num_long:
            yield from _short(number, is_second=False)
        if old >= 0:
            yield Turn(old, is_long=True, is_second=True)


def _short(number: int, *, is_second: bool) -> Iterator[Turn]:
    for each in range(NUM_SHORT):
        yield Turn(number * NUM_SHORT + each, is_long=False, is_second=is_second)


@dataclass(frozen=True, slots=True)
class SecondTurn:
    """A second turn. Its prefix is what the first turn left: whole blocks, in tokens."""

    is_long: bool
    prefix_tokens: int
    found_tokens: int
    loaded_tokens: int
    computed_s: float  # to the first token of the first turn, whose prompt is a little shorter
    ttft_s: float

    @property
    def gain(self) -> float:
        return self.computed_s / self.ttft_s

    @property
    def missing_tokens(self) -> int:
        """The tokens of the prefix that a load could bring."""
        return max(0, self.prefix_tokens - self.found_tokens)

    @property
    def is_taken(self) -> bool:
        return self.loaded_tokens >= TAKEN_SHARE * self.missing_tokens


@dataclass(frozen=True, slots=True)
class TurnsRow:
    """Gains of the long second turns, and the loads of all."""

    tier: str
    turns: int
    computed_s: float  # median
    second_s: float
    gain: float
    share_of_5x: float
    loads: int  # second turns whose prefix was not, or only in part, in the KV cache
    taken: float  # share of these
    taken_short: float
    taken_tokens: float  # share of the tokens that loads could bring
    gap_p50_ms: float  # between tokens of the decoding requests
    gap_p99_ms: float


def turns_row(tier: str, seconds: Sequence[SecondTurn], gaps_s: Sequence[float]) -> TurnsRow:
    long = [one for one in seconds if one.is_long]
    loads = [one for one in seconds if one.missing_tokens]
    sorted_s = sorted(gaps_s)
    return TurnsRow(
        tier=tier,
        turns=len(long),
        computed_s=median(one.computed_s for one in long),
        second_s=median(one.ttft_s for one in long),
        gain=median(one.gain for one in long),
        share_of_5x=_share([one.gain >= WANTED_GAIN for one in long]),
        loads=len(loads),
        taken=_share([one.is_taken for one in loads]),
        taken_short=_share([one.is_taken for one in loads if not one.is_long]),
        taken_tokens=sum(min(one.loaded_tokens, one.missing_tokens) for one in loads)
        / max(1, sum(one.missing_tokens for one in loads)),
        gap_p50_ms=_quantile(sorted_s, 0.5) * 1e3,
        gap_p99_ms=_quantile(sorted_s, 0.99) * 1e3,
    )


def _share(are_true: Sequence[bool]) -> float:
    return sum(are_true) / len(are_true) if are_true else 1.0


def _quantile(sorted_values: Sequence[float], share: float) -> float:
    if not sorted_values:
        return 0.0
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]
