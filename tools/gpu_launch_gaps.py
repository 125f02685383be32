"""Gaps between the kernels of decode steps on a GPU, as torch's profiler records them.

`python -m tools.gpu_launch_gaps --model MODEL` decodes batches, with the step of their prompts, and
prints how long the GPU computed, and how long it waited for the next launch. Copies count as
kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from baton.core.errors import NamedError
from benchmarks.engine.throughput import EngineBench, engine_meter

NUM_NAMED = 15  # kernels that take longest
MAX_NAME = 60  # characters
PLACES = {"cuda": DeviceType.CUDA, "cpu": DeviceType.CPU}


@dataclass(frozen=True, slots=True)
class Kernel:
    """Interval in which a kernel runs, in µs."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Use of a GPU from the first kernel's start to the last one's end, in µs."""

    num_kernels: int
    busy: float
    idle: float
    median_gap: float  # between two kernels in a row

    @property
    def idle_share(self) -> float:
        return self.idle / max(self.busy + self.idle, 1e-9)


def main() -> None:
    options = parse_args()
    whole = EngineBench(
        options.model,
        device=options.device,
        batch_sizes=tuple(options.batches),
        num_decode_steps=options.steps,
    )
    for kernels in options.kernels.split(","):
        try:
            print_table(replace(whole, kernels=(kernels,)))
        except NamedError as error:
            sys.exit(str(error))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder, or a name on the hub")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="triton", help="comma-separated")
    parser.add_argument("--batches", type=int, nargs="*", default=(1, 32, 256))
    parser.add_argument("--steps", type=int, default=32, help="of a decode")
    return parser.parse_args()


def print_table(bench: EngineBench) -> None:
    """Print the gaps of each batch, and the kernels that take longest in the last one."""
    print(
        f"\n{bench.kernels[0]}\n\n| batch | kernels | busy ms | idle ms | idle | median gap in µs |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    recorded: Sequence[Kernel] = ()
    with engine_meter(bench) as meter:
        for size in bench.batch_sizes:
            meter.decode(size)  # warm-up
            place = bench.device.partition(":")[0]
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                meter.decode(size)
            recorded = list(kernels_of(profiled, PLACES[place]))
            found = find_gaps(recorded)
            times = f"{found.busy / 1e3:.2f} | {found.idle / 1e3:.2f} | {found.idle_share:.0%}"
            print(
                f"| {size} | {found.num_kernels} | {times} | {found.median_gap:.1f} |", flush=True
            )
    print("\n| kernel | ms |\n|---|---|")
    for name, duration in longest(recorded):
        print(f"| {name[:MAX_NAME]} | {duration / 1e3:.2f} |")


def kernels_of(profiled: profile, place: DeviceType) -> Iterator[Kernel]:
    for event in profiled.events() or ():
        if event.device_type == place:
            yield Kernel(event.name, event.time_range.start, event.time_range.end)


def find_gaps(kernels: Sequence[Kernel]) -> Gaps:
    """Return the gaps between kernels, of which some can run at the same time."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    if not ordered:
        return Gaps(0, 0.0, 0.0, 0.0)
    gaps, end = [], ordered[0].end
    for kernel in ordered[1:]:
        gaps.append(max(0.0, kernel.start - end))
        end = max(end, kernel.end)
    idle = sum(gaps)
    median = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    return Gaps(len(ordered), end - ordered[0].start - idle, idle, median)


def longest(kernels: Sequence[Kernel]) -> list[tuple[str, float]]:
    """Return the names that take longest, with the sums of their durations."""
    durations: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        durations[kernel.name] += kernel.end - kernel.start
    return sorted(durations.items(), key=lambda item: -item[1])[:NUM_NAMED]


if __name__ == "__main__":
    main()
