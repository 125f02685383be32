"""`python -m benchmarks peer`."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.model import Quantize, Threads
from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json
from benchmarks.partial_results import report_on_exit
from engine.errors import InvalidConfig


def peer(
    model: Annotated[str, typer.Option(help="Model folder, used by all engines.")],
    vllm_venv: Annotated[
        Path | None, typer.Option(help="Virtual environment with vLLM for the CPU.")
    ] = None,
    llamacpp_venv: Annotated[
        Path | None, typer.Option(help="Virtual environment with llama-cpp-python, gguf and torch.")
    ] = None,
    threads: Threads = 2,
    quantize: Quantize = "none",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, for prefill.")] = "512,2048",
    batches: Annotated[str, typer.Option(help="Batch sizes, for decode.")] = "1,4,16,32",
    steps: Annotated[int, typer.Option(help="Decode steps in one run.")] = 16,
    runs: Annotated[int, typer.Option(help="Paired runs of each setting; medians are shown.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Compare Baton with other engines on the same model and load, in tokens per second.

    The engines alternate. With --quantize int8, llama.cpp uses its Q8_0; vLLM always uses bfloat16.
    """
    from baton.bench.engine.benchmark import EngineBench
    from baton.cli.options.lists import parse_numbers
    from benchmarks.peers.peer import Comparison, PeerBench, run

    if vllm_venv is None and llamacpp_venv is None:
        raise InvalidConfig("no peer: pass --vllm-venv, --llamacpp-venv or both")
    engine = EngineBench(
        model=model,
        dtype="bfloat16",
        num_threads=threads,
        quantize=(quantize,),
        prompt_lens=parse_numbers(prompts),
        batch_sizes=parse_numbers(batches),
        num_decode_steps=steps,
        num_runs=runs,
    )
    compared: list[dict[str, object]] = []

    def report(is_whole: bool) -> None:
        settings = {"model": model, "threads": threads, "quantize": quantize}
        values = {**settings, "is_whole": is_whole, "compared": compared}
        write_json(json_file, values)
        show_table(f"{model}, {threads} threads, medians of {runs} pairs", compared)

    with (
        report_on_exit(compared, report),
        tempfile.TemporaryDirectory(prefix="baton-peer-") as scratch,
        Console(stderr=True).status("loading") as status,
    ):

        def on_comparison(one: Comparison) -> None:
            compared.append(asdict(one))
            status.update(f"{one.peer}: {one.phase} {one.size}: {one.ratio:.2f} times")

        run(PeerBench(engine, vllm_venv, llamacpp_venv, Path(scratch)), on_comparison)
