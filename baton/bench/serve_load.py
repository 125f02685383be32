"""What is sent and when: drawn from a seed before the first request goes out. Pure."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from engine.errors import InvalidConfig

# Ids below are often special tokens.
FIRST_PLAIN_TOKEN = 10


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens: fixed, even between two, around a median, or one of several by weight."""

    kind: str
    numbers: tuple[float, ...]

    def draw(self, random_: random.Random) -> int:
        a, *others = self.numbers
        match self.kind:
            case "uniform":
                return random_.randint(int(a), int(others[0]))
            case "lognormal":
                return max(1, round(random_.lognormvariate(math.log(a), others[0])))
            case "mix":
                return int(random_.choices(self.numbers[::2], self.numbers[1::2])[0])
        return int(a)


def parse_lengths(written: str) -> Lengths:
    """128 · uniform:64:256 · lognormal:128:0.5 · mix:64x9,2048x1. Raises InvalidConfig."""
    kind, _, rest = written.partition(":") if ":" in written else ("", "", written)
    separators = {"": "", "uniform": ":", "lognormal": ":", "mix": ",x"}
    if kind not in separators:
        raise _no_lengths(written)
    for separator in separators[kind]:
        rest = rest.replace(separator, " ")
    try:
        numbers = tuple(float(one) for one in rest.split())
    except ValueError:
        raise _no_lengths(written) from None
    wanted = {"": len(numbers) == 1, "mix": bool(numbers) and len(numbers) % 2 == 0}
    is_ordered = kind != "uniform" or numbers[:1] <= numbers[1:2]
    if not wanted.get(kind, len(numbers) == 2) or not is_ordered or not min(numbers) > 0:
        raise _no_lengths(written)
    lengths = numbers[::2] if kind == "mix" else numbers[:1]
    if min(lengths) < 1:
        raise _no_lengths(written)
    return Lengths(kind, numbers)


def _no_lengths(written: str) -> InvalidConfig:
    return InvalidConfig(
        f"{written!r} is no length; write it like 128, uniform:64:256, lognormal:128:0.5 "
        "(median and sigma) or mix:64x9,2048x1 (lengths and weights)"
    )


class Arrivals(Enum):
    POISSON = "poisson"
    CONSTANT = "constant"
    BURST = "burst"  # several at once, as rarely as the rate then asks


@dataclass(frozen=True, slots=True)
class Load:
    """What clients ask for."""

    rate: float = 2.0  # requests per second
    num_requests: int = 50
    duration_s: float | None = None  # instead of a number of requests
    arrivals: Arrivals = Arrivals.POISSON
    burst_size: int = 8
    prompt: Lengths = Lengths("", (128,))
    output: Lengths = Lengths("", (64,))
    prefix_tokens: int = 0  # that prompts of one group begin with, in front of their own
    prefix_groups: int = 1
    num_warm_up: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rate", 0.0), ("num_requests", 0), ("burst_size", 0)):
            if not getattr(self, name) > least:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.duration_s is not None and not self.duration_s > 0:
            raise InvalidConfig(f"duration_s is {self.duration_s}; it must be above 0")
        if self.prefix_tokens < 0 or self.prefix_groups < 1 or self.num_warm_up < 0:
            raise InvalidConfig("prefix tokens, prefix groups and warm-up cannot be so few")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a file of prompts."""

    prompt: str | tuple[int, ...]
    max_tokens: int | None = None
    at_s: float | None = None  # since the first; else by the rate


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    number: int
    at_s: float  # since the beginning
    prompt: str | tuple[int, ...]
    max_tokens: int
    seed: int


def plan(load: Load, vocab_size: int, lines: Sequence[PromptLine] = ()) -> list[PlannedRequest]:
    """Same load, same plan. Lines of a file are taken in turn, in place of drawn prompts."""
    draw = random.Random(load.seed)
    prefixes = [
        plain_tokens(draw, vocab_size, load.prefix_tokens) for _ in range(load.prefix_groups)
    ]
    requests = []
    for number, at_s in enumerate(_times(load, random.Random(load.seed + 1))):
        if load.duration_s is None and number == load.num_requests:
            break
        if load.duration_s is not None and at_s >= load.duration_s:
            break
        own = plain_tokens(draw, vocab_size, load.prompt.draw(draw))
        prompt = draw.choice(prefixes) + own
        drawn = PlannedRequest(number, at_s, prompt, load.output.draw(draw), draw.getrandbits(32))
        requests.append(_as_told(drawn, lines) if lines else drawn)
    return sorted(requests, key=lambda request: request.at_s)


def _as_told(drawn: PlannedRequest, lines: Sequence[PromptLine]) -> PlannedRequest:
    """Lines say when the first round of them is due; later rounds come by the rate."""
    line = lines[drawn.number % len(lines)]
    told_s = line.at_s if drawn.number < len(lines) else None
    return replace(
        drawn,
        prompt=line.prompt,
        max_tokens=line.max_tokens or drawn.max_tokens,
        at_s=drawn.at_s if told_s is None else told_s,
    )


def warm_up(load: Load, vocab_size: int) -> list[PlannedRequest]:
    """Like the plan, and nothing of it: the caches may not know what will be measured."""
    if not load.num_warm_up:
        return []
    few = replace(load, num_requests=load.num_warm_up, duration_s=None, seed=~load.seed)
    return plan(replace(few, prefix_tokens=0), vocab_size)


def _times(load: Load, draw: random.Random) -> Iterator[float]:
    now = 0.0
    for number in itertools.count():
        yield now
        match load.arrivals:
            case Arrivals.POISSON:
                now += draw.expovariate(load.rate)
            case Arrivals.CONSTANT:
                now = (number + 1) / load.rate
            case Arrivals.BURST:
                now = (number + 1) // load.burst_size * load.burst_size / load.rate


def plain_tokens(draw: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(min(FIRST_PLAIN_TOKEN, vocab_size - 1), vocab_size), k=count))


def read_prompts(path: Path) -> list[PromptLine]:
    """Lines of {"prompt": text or token ids, "max_tokens": …, "at_s": …}; the last two optional."""
    try:
        written = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from error
    lines = [
        _line(f"{path}:{place}", text) for place, text in enumerate(written, 1) if text.strip()
    ]
    if not lines:
        raise InvalidConfig(f"{path} has no prompts")
    return lines


def _line(where: str, text: str) -> PromptLine:
    try:
        told = json.loads(text)
        prompt = told["prompt"]
        if not isinstance(prompt, str):
            prompt = tuple(int(one) for one in prompt)
        max_tokens, at_s = told.get("max_tokens"), told.get("at_s")
        return PromptLine(
            prompt,
            None if max_tokens is None else int(max_tokens),
            None if at_s is None else float(at_s),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidConfig(
            f'{where}: write it like {{"prompt": "text", "max_tokens": 64}} ({error})'
        ) from error
