"""Roofline on paper: the time that each kernel of a step needs at least on a GPU.

`python -m tools.gpu_roofline` counts, from a model's config, what the launches of
`--kernels triton` read, write and multiply in a step. The limit of a kernel is the longer of its
memory time and its compute time at the GPU's peak rates. No figure is measured. With `--measured`,
durations that a real run has written in the form of `--json` are printed next to the limits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import NamedError
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.config import ModelConfig
from tools.model_shapes import SHAPES
from tools.step_work import Kind, Step, Work, held_bytes, step_works

MODELS = ("llama3.1-8b", "qwen3-0.6b")


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak rates of a GPU, as its data sheet states them, without sparsity."""

    bytes_per_s: float
    flops_per_s: float  # bfloat16
    num_processors: int
    memory_bytes: float


GPUS: Mapping[str, Gpu] = {
    "h100-sxm": Gpu(3.35e12, 989e12, 132, 80e9),
    "h200-sxm": Gpu(4.8e12, 989e12, 132, 141e9),
    "l4": Gpu(300e9, 121e12, 58, 24e9),
}
DEFAULT_GPUS = ("h100-sxm", "l4")

STEPS = (
    Step("decode-1", 1, 1, 2048),
    Step("decode-32", 32, 1, 2048),
    Step("decode-256", 256, 1, 2048),
    Step("prefill-2048", 1, 2048, 2048),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel in all layers of a step. Two runs are compared by the first four fields."""

    model: str
    gpu: str
    step: str
    kernel: str
    kind: str
    launches: int
    num_bytes: int
    flops: int
    limit_s: float
    measured_s: float | None = None


def main() -> None:
    options = parse_args()
    try:
        rows = all_rows(options)
    except (ValueError, NamedError) as error:
        sys.exit(str(error))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    elif options.summary:
        print_summary(rows)
    else:
        print_kernels(rows)


def all_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows that the options select. Raises ValueError and errors of config files."""
    measured = {} if options.measured is None else read_measured(options.measured)
    return [
        row
        for model in options.model or MODELS
        for gpu in options.gpu or DEFAULT_GPUS
        for step in STEPS
        if not options.step or step.name in options.step
        for row in make_rows(model, gpu, step, measured, splits=not options.batch_invariant)
    ]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    help_text = f"folder of a model, or one of {', '.join(SHAPES)}; repeatable"
    parser.add_argument("--model", action="append", help=help_text)
    parser.add_argument("--gpu", action="append", choices=GPUS)
    parser.add_argument("--step", action="append", choices=[step.name for step in STEPS])
    help_text = "count the launches of --batch-invariant, which splits no context"
    parser.add_argument("--batch-invariant", action="store_true", help=help_text)
    parser.add_argument("--summary", action="store_true", help="one line per step")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--measured", type=Path, help="JSON rows of a run, with measured_s")
    return parser.parse_args(arguments)


def read_measured(path: Path) -> Mapping[tuple[str, ...], float]:
    """Return the durations of kernels in a step by model, GPU, step and kernel."""
    rows = json.loads(path.read_text())
    return {
        (row["model"], row["gpu"], row["step"], row["kernel"]): float(row["measured_s"])
        for row in rows
        if row.get("measured_s") is not None
    }


def make_rows(
    model: str,
    gpu: str,
    step: Step,
    measured: Mapping[tuple[str, ...], float],
    *,
    splits: bool = True,
) -> list[Row]:
    """Return the rows of a step, in the order of the kernels' first launches."""
    by_kernel: dict[str, list[Work]] = {}
    num_processors = GPUS[gpu].num_processors if splits else 1
    for work in step_works(read_config(model), step, num_processors):
        by_kernel.setdefault(work.kernel, []).append(work)
    return [
        Row(
            model,
            gpu,
            step.name,
            kernel,
            works[0].kind.value,
            launches=sum(work.launches for work in works),
            num_bytes=sum(work.num_bytes for work in works),
            flops=sum(work.flops for work in works),
            limit_s=sum(limit_s(work, GPUS[gpu]) for work in works),
            measured_s=measured.get((model, gpu, step.name, kernel)),
        )
        for kernel, works in by_kernel.items()
    ]


def limit_s(work: Work, gpu: Gpu) -> float:
    """Return the longer of memory time and compute time, which can overlap."""
    return max(work.num_bytes / gpu.bytes_per_s, work.flops / gpu.flops_per_s)


def read_config(model: str) -> ModelConfig:
    """Read the config of a folder or of a shape. Raises ValueError if it cannot be counted."""
    with tempfile.TemporaryDirectory() as written:
        folder = Path(model)
        if model in SHAPES:
            folder, shape = Path(written), SHAPES[model]
            config = shape.scale(shape.published_layers, shape.published_experts)
            (folder / "config.json").write_text(json.dumps(config))
        read = read_model_config(SafetensorsFolder(folder))
    if read.latent or read.moe or read.recurrent or read.has_output_gate:
        raise ValueError(f"{model}: only dense models with plain attention are counted")
    return read


def print_kernels(rows: Iterable[Row]) -> None:
    """Print a table of kernels for each step."""
    for case, own in by_case(rows).items():
        print(f"\n{', '.join(case)}\n")
        print("| kernel | launches | MB | GFLOP | limit in µs | measured in µs |")
        print("|---|---|---|---|---|---|")
        for row in own:
            figures = (row.num_bytes / 1e6, row.flops / 1e9, row.limit_s * 1e6)
            known = "" if row.measured_s is None else f"{row.measured_s * 1e6:.1f}"
            numbers = " | ".join(f"{figure:.1f}" for figure in figures)
            print(f"| {row.kernel} | {row.launches} | {numbers} | {known} |")


def print_summary(rows: Iterable[Row]) -> None:
    """Print a line for each step. Shares are those of the limit."""
    shares = " | ".join(kind.value for kind in Kind)
    print(f"| model | GPU | step | launches | GB | TFLOP | limit in ms | {shares} | fits |")
    print("|---" * (8 + len(Kind)) + "|")
    for case, own in by_case(rows).items():
        total_s = sum(row.limit_s for row in own)
        figures = [
            str(sum(row.launches for row in own)),
            f"{sum(row.num_bytes for row in own) / 1e9:.2f}",
            f"{sum(row.flops for row in own) / 1e12:.3f}",
            f"{total_s * 1e3:.2f}",
            *(f"{share(own, kind, total_s):.0%}" for kind in Kind),
            "yes" if fits(*case) else "no",
        ]
        print(f"| {' | '.join([*case, *figures])} |")


def fits(model: str, gpu: str, step_name: str) -> bool:
    """Return whether the GPU's memory holds weights, keys and values."""
    config, step = read_config(model), next(step for step in STEPS if step.name == step_name)
    works = step_works(config, step, GPUS[gpu].num_processors)
    return held_bytes(config, works) <= GPUS[gpu].memory_bytes


def share(rows: Iterable[Row], kind: Kind, total_s: float) -> float:
    return sum(row.limit_s for row in rows if row.kind == kind.value) / total_s


def by_case(rows: Iterable[Row]) -> Mapping[tuple[str, str, str], list[Row]]:
    """Return the rows by model, GPU and step."""
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.model, row.gpu, row.step), []).append(row)
    return cases


if __name__ == "__main__":
    main()
