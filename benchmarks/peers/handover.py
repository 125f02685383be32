"""Hand-off benchmark: time to first token added by a separate prefill node.

Prompts run one at a time on an otherwise idle machine: on a colocated node, and on a prefill node
with the same cores whose decode node has the other cores. The order alternates between pairs.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.errors import InvalidConfig
from benchmarks.peers.completions_api import (
    CompletionsApi,
    EngineFailed,
    ServedModel,
    random_prompt,
)
from benchmarks.peers.warm_engines import Start

ANSWER_TOKENS = 4
NUM_WARM_UP = 2  # prompts per setup


@dataclass(frozen=True, slots=True)
class Handover:
    prompt_tokens: int = 512
    num_pairs: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.num_pairs) < 1:
            raise InvalidConfig("a run needs prompts of at least one token, and at least one pair")


@dataclass(frozen=True, slots=True)
class Times:
    """Latencies of one prompt as seen by its client."""

    first_token_ms: float
    second_token_ms: float  # after the first: includes the rest of the hand-off


@dataclass(frozen=True, slots=True)
class TimedPair:
    """The same prompt on both setups."""

    together: Times
    apart: Times


@dataclass(frozen=True, slots=True)
class Added:
    """Medians over the pairs. A ratio is apart (disaggregated) over together (colocated)."""

    time: str
    together_ms: float
    apart_ms: float
    added_ms: float  # median of the differences
    added_share: float  # median of the ratios minus one
    least_share: float
    most_share: float


def run(
    bench: Handover, together: Start, apart: Start, on_pair: Callable[[TimedPair], None]
) -> None:
    """Run both setups and call `on_pair` with each pair. Raises EngineFailed."""
    draw = random.Random(bench.seed)
    with together() as one_node, apart() as two_nodes:
        apis = [(api, api.model()) for api in (one_node, two_nodes)]
        for api, model in apis * NUM_WARM_UP:
            _timed(api, model, random_prompt(draw, bench.prompt_tokens))
        for number in range(bench.num_pairs):
            prompt = random_prompt(draw, bench.prompt_tokens)
            on_pair(_pair(apis, prompt, is_reversed=number % 2 == 1))


def _pair(
    apis: Sequence[tuple[CompletionsApi, ServedModel]], prompt: Sequence[int], *, is_reversed: bool
) -> TimedPair:
    """Measure a prompt on both setups, the second one first if `is_reversed`."""
    order = apis[::-1] if is_reversed else apis
    times = [_timed(api, model, prompt) for api, model in order]
    return TimedPair(*(times[::-1] if is_reversed else times))


def _timed(api: CompletionsApi, model: ServedModel, prompt: Sequence[int]) -> Times:
    streamed = api.stream(model.name, prompt, ANSWER_TOKENS)
    if len(streamed.arrivals) < 2:
        raise EngineFailed(f"{api.url} sent its whole answer at once")
    (first_s, _), (second_s, _) = streamed.arrivals[:2]
    return Times((first_s - streamed.sent_s) * 1e3, (second_s - first_s) * 1e3)


def added(pairs: Sequence[TimedPair]) -> list[Added]:
    """Return the added time to the first token, from first to second, and to the second."""
    return [
        _added("first token", pairs, lambda times: times.first_token_ms),
        _added("from first to second", pairs, lambda times: times.second_token_ms),
        _added("second token", pairs, lambda times: times.first_token_ms + times.second_token_ms),
    ]


def _added(name: str, pairs: Sequence[TimedPair], of: Callable[[Times], float]) -> Added:
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
