"""What a first token costs more where the prompt is computed by a prefill node.

One prompt at a time and nothing beside it: first at a node that does both, then at a prefill node
on the same cores whose decode node has the others, and the other way round in the next pair.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.bench.staying import Start
from baton.bench.streams import Door, EngineFailed, Model, drawn_prompt
from engine.errors import InvalidConfig

ANSWER_TOKENS = 4
NUM_WARM_UP = 2  # of each


@dataclass(frozen=True, slots=True)
class Handover:
    prompt_tokens: int = 512
    num_pairs: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.num_pairs) < 1:
            raise InvalidConfig("a prompt has a token at least, and there is one pair at least")


@dataclass(frozen=True, slots=True)
class Times:
    """Of one prompt, as its client saw it."""

    first_token_ms: float
    second_token_ms: float  # since the first: whatever the hand-off still held back


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt in both places."""

    together: Times
    apart: Times


@dataclass(frozen=True, slots=True)
class Added:
    """Medians over the pairs. Ratios are apart over together, pair by pair."""

    time: str
    together_ms: float
    apart_ms: float
    added_ms: float  # median of the differences
    added_share: float  # median of the ratios, less one
    least_share: float
    most_share: float


def run(what: Handover, together: Start, apart: Start, on_pair: Callable[[Pair], None]) -> None:
    """Both are up all the time; `on_pair` gets each as it is done. Raises EngineFailed."""
    draw = random.Random(what.seed)
    with together() as one_node, apart() as two_nodes:
        doors = [(door, door.model()) for door in (one_node, two_nodes)]
        for door, model in doors * NUM_WARM_UP:
            _timed(door, model, drawn_prompt(draw, what.prompt_tokens))
        for number in range(what.num_pairs):
            prompt = drawn_prompt(draw, what.prompt_tokens)
            on_pair(_pair(doors, prompt, is_turned=number % 2 == 1))


def _pair(doors: Sequence[tuple[Door, Model]], prompt: Sequence[int], *, is_turned: bool) -> Pair:
    """Whoever comes second in one pair comes first in the next."""
    order = doors[::-1] if is_turned else doors
    times = [_timed(door, model, prompt) for door, model in order]
    return Pair(*(times[::-1] if is_turned else times))


def _timed(door: Door, model: Model, prompt: Sequence[int]) -> Times:
    streamed = door.stream(model.name, prompt, ANSWER_TOKENS)
    if len(streamed.arrivals) < 2:
        raise EngineFailed(f"{door.url} sent its whole answer at once")
    (first_s, _), (second_s, _) = streamed.arrivals[:2]
    return Times((first_s - streamed.sent_s) * 1e3, (second_s - first_s) * 1e3)


def added(pairs: Sequence[Pair]) -> list[Added]:
    """For the first token, for the one behind it, and for both in a row."""
    return [
        _added("first token", pairs, lambda times: times.first_token_ms),
        _added("from first to second", pairs, lambda times: times.second_token_ms),
        _added("second token", pairs, lambda times: times.first_token_ms + times.second_token_ms),
    ]


def _added(name: str, pairs: Sequence[Pair], of: Callable[[Times], float]) -> Added:
    both = [(of(pair.together), of(pair.apart)) for pair in pairs]
    shares = [apart_ms / together_ms - 1 for together_ms, apart_ms in both]
    return Added(
        time=name,
        together_ms=statistics.median(together_ms for together_ms, _ in both),
        apart_ms=statistics.median(apart_ms for _, apart_ms in both),
        added_ms=statistics.median(apart_ms - together_ms for together_ms, apart_ms in both),
        added_share=statistics.median(shares),
        least_share=min(shares),
        most_share=max(shares),
    )
