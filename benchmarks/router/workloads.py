"""Requests of the routing simulation: drawn sessions, and recorded traces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.replay.trace import ReplayTrace, TraceRequest
from benchmarks.replay.workload import PromptBuilder, Scaling

VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class SimRequest:
    at_s: float
    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()
    num_answer_tokens: int = 0

    @property
    def sequence(self) -> tuple[int, ...]:
        """Tokens whose KV the decode node has at the end."""
        return (*self.token_ids, *self.answer_ids)[:-1]


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations that share system prompts. Each turn adds tokens to the prompt of the last."""

    num_system_prompts: int = 50
    skew: float = 1.1  # Zipf exponent of their popularity
    system_tokens: int = 512
    turn_tokens: int = 256  # added by each turn, without the answer
    answer_tokens: int = 32
    has_answers: bool = False  # the next prompt contains the answer
    max_turns: int = 12  # uniform from 1
    least_pause_s: float = 2.0  # between turns
    mean_pause_s: float = 4.0

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean length of a prompt. Late turns are rarer: sessions have 1 to max_turns turns."""
        added = self.turn_tokens + self.answer_tokens * self.has_answers
        return self.system_tokens + self.turn_tokens + added * (self.max_turns - 1) / 3


def draw_sessions(
    bench: Sessions, num_requests: int, tokens_per_s: float, seed: int
) -> list[SimRequest]:
    """Return requests in order of time, whose prompts have so many tokens a second."""
    draw = random.Random(seed)
    systems = [_tokens(draw, bench.system_tokens) for _ in range(bench.num_system_prompts)]
    weights = [1 / place**bench.skew for place in range(1, len(systems) + 1)]
    mean_turns = (1 + bench.max_turns) / 2
    per_s = tokens_per_s / bench.mean_prompt_tokens
    # Start before time 0, so that sessions of every age exist at the start.
    now, end_s = -bench.max_turns * bench.mean_pause_s, num_requests / per_s
    requests: list[SimRequest] = []
    while now < end_s:
        now += draw.expovariate(per_s / mean_turns)
        [system] = draw.choices(systems, weights)
        requests += _session(bench, draw, now, system)
    timely = (request for request in requests if 0 <= request.at_s < end_s)
    return sorted(timely, key=lambda request: request.at_s)


def recorded(trace: ReplayTrace, tokens_per_s: float, block_size: int) -> list[SimRequest]:
    """Return the requests of a trace, with a block for each block of the recording.

    Time is scaled so that prompts have so many tokens a second.
    """
    builder = PromptBuilder(Scaling(trace.block_tokens, block_size), VOCAB_SIZE)
    return _at_rate(
        [_recorded(builder, *numbered) for numbered in enumerate(trace.requests)], tokens_per_s
    )


def _recorded(builder: PromptBuilder, number: int, request: TraceRequest) -> SimRequest:
    prompt = builder.build(number, request)
    return SimRequest(request.at_s, prompt.token_ids, num_answer_tokens=prompt.num_output_tokens)


def _at_rate(requests: Sequence[SimRequest], tokens_per_s: float) -> list[SimRequest]:
    num_tokens = sum(len(request.token_ids) for request in requests)
    start_s = requests[0].at_s
    factor = num_tokens / tokens_per_s / (requests[-1].at_s - start_s)
    return [replace(each, at_s=(each.at_s - start_s) * factor) for each in requests]


def _session(
    bench: Sessions, draw: random.Random, at_s: float, history: tuple[int, ...]
) -> list[SimRequest]:
    turns = []
    for _ in range(draw.randint(1, bench.max_turns)):
        history += _tokens(draw, bench.turn_tokens)
        answer = _tokens(draw, bench.answer_tokens) if bench.has_answers else ()
        turns.append(SimRequest(at_s, history, answer, bench.answer_tokens))
        history += answer
        at_s += bench.least_pause_s
        at_s += draw.expovariate(1 / (bench.mean_pause_s - bench.least_pause_s))
    return turns


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(VOCAB_SIZE), k=count))
