"""Effect of long-prefill-token-threshold on short prompts among long ones, on a prefill node.

One engine gets prompts at random times and computes the first token of each, like a prefill node.
Time is the CPU time of this process and idle time is skipped, so that other load on the machine
does not count. Each row has the same prompts at the same times.

    python -m tools.compare_prefill_thresholds --model models/demo --long 900
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.factory import build_engine
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.load import load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.scheduler.config import SchedulerConfig

BUDGET = 2048  # --max-num-batched-tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_tokens: int


@dataclass(slots=True)
class CpuClock:
    """CPU time plus skipped idle time."""

    skipped_s: float = 0.0

    def now(self) -> float:
        return time.process_time() + self.skipped_s

    def skip_to(self, at_s: float) -> None:
        self.skipped_s += max(0.0, at_s - self.now())


def arrivals(args: argparse.Namespace, draw: random.Random) -> list[Arrival]:
    at_s, result = 0.0, []
    for _ in range(args.requests):
        at_s += draw.expovariate(args.rate)
        is_long = draw.random() < args.share
        result.append(Arrival(at_s, args.long if is_long else args.short))
    return result


def first_tokens(
    runner: TorchRunner, threshold: int, prompts: Sequence[Arrival]
) -> Iterator[tuple[Arrival, float]]:
    """Yield each prompt with its time to first token."""
    scheduling = SchedulerConfig(
        max_num_batched_tokens=BUDGET,
        long_prefill_token_threshold=threshold,
        max_long_partial_prefills=1 if threshold else None,
    )
    clock = CpuClock()
    engine = build_engine(runner, EngineOptions(scheduling, enable_prefix_caching=False))
    begin_s, waiting, num_running = clock.now(), list(enumerate(prompts)), 0
    while waiting or num_running:
        if not num_running:
            clock.skip_to(begin_s + waiting[0][1].at_s)
        while waiting and begin_s + waiting[0][1].at_s <= clock.now():
            number, arrival = waiting.pop(0)
            engine.scheduler.add(_spec(number, arrival, runner.info.vocab_size))
            num_running += 1
        for output in engine.step():
            arrival = prompts[int(output.request_id)]
            num_running -= 1
            yield arrival, clock.now() - begin_s - arrival.at_s


def _spec(number: int, arrival: Arrival, vocab_size: int) -> EngineRequest:
    draw = random.Random(number)
    prompt = tuple(draw.randrange(2, vocab_size) for _ in range(arrival.num_tokens))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return EngineRequest(RequestId(str(number)), prompt, sampling, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--thresholds", default="0,128,256,512,1024,2048")
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--long", type=int, default=900)
    parser.add_argument("--share", type=float, default=0.1, help="share of long prompts")
    parser.add_argument("--rate", type=float, default=6.0, help="prompts per second")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = RunnerConfig(model=args.model, kv_cache_bytes=1 << 30, max_num_seqs=128, num_threads=1)
    rows_by_threshold: dict[int, list[tuple[float, ...]]] = {}
    with load_runner(config) as runner:
        for number in range(args.rounds):
            prompts = arrivals(args, random.Random(number))
            for threshold in map(int, args.thresholds.split(",")):
                row = _row(runner, threshold, prompts, args.long)
                rows_by_threshold.setdefault(threshold, []).append(row)
    print("threshold   short p50   short p99   long p50   long p99   ms, medians of the rounds")
    for threshold, rows in rows_by_threshold.items():
        figures = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"{threshold:9}", *(f"{figure:11.1f}" for figure in figures))


def _row(
    runner: TorchRunner, threshold: int, prompts: Sequence[Arrival], long: int
) -> tuple[float, ...]:
    waits = list(first_tokens(runner, threshold, prompts))
    short = sorted(wait for arrival, wait in waits if arrival.num_tokens != long)
    others = sorted(wait for arrival, wait in waits if arrival.num_tokens == long)
    return tuple(
        1000 * group[min(len(group) - 1, int(share * len(group)))]
        for group in (short, others)
        for share in (0.5, 0.99)
    )


if __name__ == "__main__":
    main()
