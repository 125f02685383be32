"""Load plan: requests, send times drawn from a seed before the run, and objectives. Pure."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

from baton.core.errors import InvalidConfig
from baton.core.options import Option, check_options

# Panels of the help page.
TARGET = "Target"
LOAD = "Load"

# Lower ids are often special tokens.
FIRST_PLAIN_TOKEN = 10
SLO_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of a good answer. None: no objective."""

    ttft: float | None = None  # seconds
    itl: float | None = None  # 99th percentile of the answer's gaps
    tpot: float | None = None  # mean time per token after the first
    e2e: float | None = None


NO_OBJECTIVES = Slo()


def parse_slo(written: str) -> Slo:
    """Parse objectives such as `ttft=500ms,itl=50ms`. Raises InvalidConfig."""
    limits: dict[str, float] = {}
    for part in filter(None, written.split(",")):
        name, _, limit = part.strip().partition("=")
        unit = "ms" if limit.endswith("ms") else "s"
        try:
            limits[name] = float(limit.removesuffix(unit)) * SLO_UNITS[unit]
            Slo(**limits)
        except (ValueError, TypeError):
            raise InvalidConfig(
                f"{part!r} is not an objective; write it like ttft=500ms,itl=50ms,tpot=40ms,e2e=5s"
            ) from None
    return Slo(**limits)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of token counts: fixed, uniform, log-normal or a weighted mix."""

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
    """Parse 128, uniform:64:256, lognormal:128:0.5 or mix:64x9,2048x1. Raises InvalidConfig."""
    kind, _, rest = written.partition(":") if ":" in written else ("", "", written)
    separators = {"": "", "uniform": ":", "lognormal": ":", "mix": ",x"}
    if kind not in separators:
        raise _invalid_lengths(written)
    for separator in separators[kind]:
        rest = rest.replace(separator, " ")
    try:
        numbers = tuple(float(one) for one in rest.split())
    except ValueError:
        raise _invalid_lengths(written) from None
    wanted = {"": len(numbers) == 1, "mix": bool(numbers) and len(numbers) % 2 == 0}
    is_ordered = kind != "uniform" or numbers[:1] <= numbers[1:2]
    if not wanted.get(kind, len(numbers) == 2) or not is_ordered or not min(numbers) > 0:
        raise _invalid_lengths(written)
    lengths = numbers[::2] if kind == "mix" else numbers[:1]
    if min(lengths) < 1:
        raise _invalid_lengths(written)
    return Lengths(kind, numbers)


def _invalid_lengths(written: str) -> InvalidConfig:
    return InvalidConfig(
        f"{written!r} is not a length; write it like 128, uniform:64:256, lognormal:128:0.5 "
        "(median and sigma) or mix:64x9,2048x1 (lengths and weights)"
    )


class Arrivals(Enum):
    POISSON = "poisson"
    CONSTANT = "constant"
    BURST = "burst"  # several at once, at intervals that give the mean rate


@dataclass(frozen=True, slots=True)
class ServeLoad:
    rate: Annotated[float, Option("Requests per second.", LOAD, above=0)] = 2.0
    num_requests: Annotated[
        int, Option("Number of requests.", LOAD, name="requests", at_least=1)
    ] = 50
    duration_s: Annotated[
        float | None,
        Option("Seconds of load, instead of --requests.", LOAD, name="duration", above=0),
    ] = None
    arrivals: Annotated[Arrivals, Option("Arrival process: poisson, constant or burst.", LOAD)] = (
        Arrivals.POISSON
    )
    burst_size: Annotated[
        int, Option("Requests per burst, with --arrivals burst.", LOAD, at_least=1, is_setting=True)
    ] = 8
    prompt: Annotated[
        Lengths,
        Option(
            "Length of generated prompts: 128, uniform:64:256, lognormal:128:0.5 or "
            "mix:64x9,2048x1.",
            LOAD,
            name="prompt_tokens",
            default="128",
            parse=parse_lengths,
        ),
    ] = Lengths("", (128,))
    output: Annotated[
        Lengths,
        Option(
            "Length of answers, in the same format.",
            LOAD,
            name="output_tokens",
            default="64",
            parse=parse_lengths,
        ),
    ] = Lengths("", (64,))
    prefix_tokens: Annotated[
        int, Option("Tokens of the prefix that the prompts of a group share.", LOAD, at_least=0)
    ] = 0
    prefix_groups: Annotated[int, Option("Number of such groups.", LOAD, at_least=1)] = 1
    num_warm_up: Annotated[
        int,
        Option(
            "Requests sent before the measurement.",
            LOAD,
            name="warm_up",
            at_least=0,
            is_setting=True,
        ),
    ] = 2
    seed: Annotated[int, Option("Seed of the requests and their arrival times.", LOAD)] = 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class PromptLine:
    prompt: str | tuple[int, ...]
    max_tokens: int | None = None
    at_s: float | None = None  # since the start; None: by the rate


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    number: int
    at_s: float  # since the start
    prompt: str | tuple[int, ...]
    max_tokens: int
    seed: int


def plan(
    load: ServeLoad, vocab_size: int, lines: Sequence[PromptLine] = ()
) -> list[PlannedRequest]:
    """Return the requests of a load, deterministically. Lines of a file replace drawn prompts."""
    draw = random.Random(load.seed)
    prefixes = [
        random_tokens(draw, vocab_size, load.prefix_tokens) for _ in range(load.prefix_groups)
    ]
    requests = []
    for number, at_s in enumerate(_times(load, random.Random(load.seed + 1))):
        if load.duration_s is None and number == load.num_requests:
            break
        if load.duration_s is not None and at_s >= load.duration_s:
            break
        own = random_tokens(draw, vocab_size, load.prompt.draw(draw))
        prompt = draw.choice(prefixes) + own
        drawn = PlannedRequest(number, at_s, prompt, load.output.draw(draw), draw.getrandbits(32))
        requests.append(_from_line(drawn, lines) if lines else drawn)
    return sorted(requests, key=lambda request: request.at_s)


def _from_line(drawn: PlannedRequest, lines: Sequence[PromptLine]) -> PlannedRequest:
    """Apply a line of the prompt file. Its send time counts for the first use of the line only."""
    line = lines[drawn.number % len(lines)]
    line_s = line.at_s if drawn.number < len(lines) else None
    return replace(
        drawn,
        prompt=line.prompt,
        max_tokens=line.max_tokens or drawn.max_tokens,
        at_s=drawn.at_s if line_s is None else line_s,
    )


def warm_up(load: ServeLoad, vocab_size: int) -> list[PlannedRequest]:
    """Return warm-up requests like those of the plan, with other prompts to avoid cache hits."""
    if not load.num_warm_up:
        return []
    few = replace(load, num_requests=load.num_warm_up, duration_s=None, seed=~load.seed)
    return plan(replace(few, prefix_tokens=0), vocab_size)


def _times(load: ServeLoad, draw: random.Random) -> Iterator[float]:
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


def random_tokens(draw: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(min(FIRST_PLAIN_TOKEN, vocab_size - 1), vocab_size), k=count))


def read_prompts(path: Path | None) -> Sequence[PromptLine]:
    """Read lines of {"prompt": text or token ids, "max_tokens": …, "at_s": …}.

    The last two are optional. Raises InvalidConfig.
    """
    if path is None:
        return ()
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from error
    lines = [_line(f"{path}:{place}", text) for place, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise InvalidConfig(f"{path} has no prompts")
    return lines


def _line(where: str, text: str) -> PromptLine:
    try:
        values = json.loads(text)
        prompt = values["prompt"]
        if not isinstance(prompt, str):
            prompt = tuple(int(one) for one in prompt)
        max_tokens, at_s = values.get("max_tokens"), values.get("at_s")
        return PromptLine(
            prompt,
            None if max_tokens is None else int(max_tokens),
            None if at_s is None else float(at_s),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidConfig(
            f'{where}: write it like {{"prompt": "text", "max_tokens": 64}} ({error})'
        ) from error


def parse_rates(written: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(one) for one in filter(None, written.split(",")))
    except ValueError:
        raise InvalidConfig(f"--rates {written}: write it like 1,2,4") from None
    if any(not rate > 0 for rate in rates):
        raise InvalidConfig(f"--rates {written}: every rate must be above 0")
    return rates


@dataclass(frozen=True, slots=True)
class ServeBench:
    load: ServeLoad
    rates: Annotated[  # one run for each; else the load's own rate
        Sequence[float],
        Option(
            "Run once at each of these rates, such as 1,2,4.", LOAD, default="", parse=parse_rates
        ),
    ] = ()
    slo: Annotated[
        Slo,
        Option(
            "Objectives of a good answer: ttft, itl (p99 of the answer), tpot, e2e.",
            LOAD,
            default="ttft=500ms,itl=50ms",
            parse=parse_slo,
        ),
    ] = Slo()
    concurrency: Annotated[
        int | None,
        Option(
            "Maximum requests in flight; waiting for a slot counts as latency.", LOAD, at_least=1
        ),
    ] = None
    num_rounds: Annotated[
        int, Option("Rounds of a comparison.", TARGET, name="rounds", default=3, at_least=1)
    ] = 1
    lines: Annotated[
        Sequence[PromptLine],
        Option(
            'JSONL: {"prompt": text or ids, "max_tokens": …, "at_s": …}.',
            LOAD,
            name="prompts",
            kind=Path | None,
            parse=read_prompts,
        ),
    ] = ()
