"""`python -m benchmarks peer`."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.model import ActivationDtype, Quantize, Threads
from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json
from baton.core.errors import InvalidConfig
from benchmarks.partial_results import report_on_exit


def peer(
    model: Annotated[str, typer.Option(help="Model folder or GGUF file, used by all engines.")],
    vllm_venv: Annotated[
        Path | None, typer.Option(help="Virtual environment with vLLM for the CPU.")
    ] = None,
    llamacpp_venv: Annotated[
        Path | None, typer.Option(help="Virtual environment with llama-cpp-python, gguf and torch.")
    ] = None,
    openvino_venv: Annotated[
        Path | None,
        typer.Option(help="Virtual environment with openvino-genai, for GGUF files."),
    ] = None,
    threads: Threads = 2,
    quantize: Quantize = "none",
    activation_dtype: ActivationDtype = "auto",
    llamacpp_weights: Annotated[
        str,
        typer.Option(
            help="Weights of llama.cpp: bf16, q8_0, q4_0 or q4_k_m; auto: as many bits as Baton's."
        ),
    ] = "auto",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, for prefill.")] = "512,2048",
    batches: Annotated[str, typer.Option(help="Batch sizes, for decode.")] = "1,4,16,32",
    steps: Annotated[int, typer.Option(help="Decode steps in one run.")] = 16,
    runs: Annotated[int, typer.Option(help="Paired runs of each setting; medians are shown.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Compare Baton with other engines on the same model and load, in tokens per second.

    The engines alternate. With --quantize int8, llama.cpp uses its Q8_0, and with int4 its Q4_0;
    vLLM always uses bfloat16. Of a GGUF file, all use the weights that it has. A peer that cannot
    run the model is named and left out.
    """
    from benchmarks.cli.lists import parse_numbers
    from benchmarks.engine.throughput import EngineBench
    from benchmarks.peers.peer import Comparison, PeerBench, run
    from benchmarks.peers.peer_process import PeerFailed

    if not any((vllm_venv, llamacpp_venv, openvino_venv)):
        raise InvalidConfig("no peer: pass --vllm-venv, --llamacpp-venv or --openvino-venv")
    engine = EngineBench(
        model=model,
        dtype="bfloat16",
        num_threads=threads,
        quantize=(quantize,),
        activation_dtypes=(activation_dtype,),
        prompt_lens=parse_numbers(prompts),
        batch_sizes=parse_numbers(batches),
        num_decode_steps=steps,
        num_runs=runs,
    )
    is_file = Path(model).is_file()
    weights = "those of the file" if is_file else _llamacpp_weights(llamacpp_weights, quantize)
    compared: list[dict[str, object]] = []
    failed: list[str] = []

    def report(is_whole: bool) -> None:
        settings = {"model": model, "threads": threads, "quantize": quantize}
        settings["activation_dtype"] = activation_dtype
        if llamacpp_venv is not None:
            settings["llamacpp_weights"] = weights
        values = {**settings, "is_whole": is_whole, "compared": compared, "failed": failed}
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

        def on_failure(failure: PeerFailed) -> None:
            failed.append(str(failure))
            status.console.print(f"baton: warning: {failure}")

        bench = PeerBench(engine, vllm_venv, llamacpp_venv, Path(scratch), weights, openvino_venv)
        run(bench, on_comparison, on_failure)


def _llamacpp_weights(written: str, quantize: str) -> str:
    """Resolve auto. Raises InvalidConfig."""
    from benchmarks.peers.peer import LLAMACPP_WEIGHTS

    if written in LLAMACPP_WEIGHTS:
        return written
    if written != "auto":
        raise InvalidConfig(f"llamacpp_weights is {written!r}; write {', '.join(LLAMACPP_WEIGHTS)}")
    return next(name for name, bits in LLAMACPP_WEIGHTS.items() if bits == quantize)
