"""Compare the engine on a GPU with vLLM's, and both with the limits on paper.

`python -m tools.gpu_peers --model MODEL --vllm-venv VENV` measures decodes and prefills of the same
model under the same load, engine by engine in turn, and prints a table. Without an environment
that has vLLM, Baton is measured alone. Limits are those of `tools.gpu_roofline` for the contexts
that are measured, on the GPUs that it knows.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import NamedError
from baton.engine.runner.families.read_config import read_model_config
from benchmarks.engine.throughput import EngineBench, Rate, context_of
from benchmarks.engine.throughput import run as run_engine
from benchmarks.peers.peer import Comparison, PeerBench
from benchmarks.peers.peer import run as run_peers
from benchmarks.peers.peer_process import PeerFailed
from tools.gpu_roofline import GPUS, make_rows
from tools.step_work import Step

# Names that the driver gives to the GPUs of the roofline.
NAMES = {
    "h100-sxm": re.compile(r"\bH100 80GB HBM3\b"),
    "h200-sxm": re.compile(r"\bH200$"),
    "l4": re.compile(r"\bL4\b"),
}
ROOM = 8  # tokens of the context that a prompt leaves free


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens per second of one setting, medians. None: not measured, or not known."""

    phase: str  # prefill or decode
    size: int  # tokens of the prompt, or requests in the batch
    baton: float
    vllm: float | None = None
    ratio: float | None = None  # median over the pairs
    limit: float | None = None


def main() -> None:
    options = parse_args()
    try:
        bench = make_bench(options, open_checkpoint(options.model))
        gpu = options.gpu or find_gpu(options.device)
        print(f"Tokens per second; contexts of decodes: {context_of(bench)} tokens.")
        print(f"Limits: {gpu or 'none, the device is not in the roofline'}.\n")
        print("| phase | size | Baton | vLLM | ratio | limit | Baton's share | vLLM's share |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        measure(bench, options.vllm_venv, gpu, lambda figure: print(row_of(figure), flush=True))
    except NamedError as error:
        sys.exit(str(error))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder, or a name on the hub")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--vllm-venv", type=Path, help="virtual environment with vLLM")
    parser.add_argument("--gpu", choices=GPUS, help="of the limits; by default, the device")
    parser.add_argument("--batches", type=int, nargs="*", default=(1, 32, 256))
    parser.add_argument("--prompts", type=int, nargs="*", default=(2048,))
    parser.add_argument("--context", type=int, default=32, help="of decodes, at their start")
    parser.add_argument("--steps", type=int, default=32, help="of a measured decode")
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args(arguments)


def make_bench(options: argparse.Namespace, checkpoint: Checkpoint) -> EngineBench:
    """Return the settings. Prompts are shortened to the context of the model."""
    max_len = read_model_config(checkpoint).max_context_len() - ROOM
    return EngineBench(
        model=str(checkpoint.path),
        dtype="bfloat16",
        kernels=(options.kernels,),
        prompt_lens=tuple(min(length, max_len) for length in options.prompts),
        batch_sizes=tuple(options.batches),
        num_decode_steps=options.steps,
        decode_prompt_len=min(options.context, max_len - 2 * options.steps),
        num_runs=options.runs,
        device=options.device,
    )


def find_gpu(device: str) -> str | None:
    """Return the name of the device in the roofline, or None."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu for gpu, pattern in NAMES.items() if pattern.search(name)), None)


def measure(
    bench: EngineBench,
    vllm_venv: Path | None,
    gpu: str | None,
    on_figure: Callable[[Figure], None],
) -> None:
    """Measure all settings.

    Raises PeerFailed if vLLM cannot run the model, after Baton has been measured alone.
    """

    def compare(one: Comparison) -> None:
        rates = one.baton_tokens_per_s, one.peer_tokens_per_s, one.ratio
        on_figure(Figure(one.phase, one.size, *rates, limit_of(bench, one.phase, one.size, gpu)))

    def note(rate: Rate) -> None:
        limit = limit_of(bench, rate.phase, rate.size, gpu)
        on_figure(Figure(rate.phase, rate.size, rate.median_tokens_per_s, limit=limit))

    if vllm_venv is None:
        run_engine(bench, note)
        return
    try:
        with tempfile.TemporaryDirectory(prefix="baton-peer-") as scratch:
            run_peers(PeerBench(bench, vllm_venv, None, Path(scratch)), compare)
    except PeerFailed:
        run_engine(bench, note)
        raise


def limit_of(bench: EngineBench, phase: str, size: int, gpu: str | None) -> float | None:
    """Return the tokens per second on paper, or None if GPU or model are not counted."""
    if gpu is None:
        return None
    step = Step(phase, 1, size, size)
    if phase == "decode":
        step = Step(phase, size, 1, context_of(bench))
    try:
        rows = make_rows(bench.model, gpu, step, {})
    except ValueError:
        return None
    return size / sum(row.limit_s for row in rows)


def row_of(figure: Figure) -> str:
    """Return a row of the table. What is not known stays empty."""
    shares = [share_of(rate, figure.limit) for rate in (figure.baton, figure.vllm)]
    rates = [rate_text(each) for each in (figure.baton, figure.vllm)]
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    columns = [figure.phase, figure.size, *rates, ratio, rate_text(figure.limit), *shares]
    return f"| {' | '.join(map(str, columns))} |"


def rate_text(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1f}"


def share_of(rate: float | None, limit: float | None) -> str:
    return "" if rate is None or limit is None else f"{rate / limit:.0%}"


if __name__ == "__main__":
    main()
