"""`python -m benchmarks engine`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from baton.cli.options.model import KvDtype
from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from baton.core.options import Option
from benchmarks.cli.lists import parse_names, parse_numbers


def engine(
    model: Annotated[
        str, Option("Model folder, or a name on the Hugging Face hub.")
    ] = "models/demo",
    dtype: Annotated[str, Option("auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, Option("cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int | None, Option("Number of torch threads.")] = None,
    kernels: Annotated[
        str,
        Option("auto, native, triton or torch; a comma-separated list is measured alternately."),
    ] = "auto",
    quantize: Annotated[
        str, Option("none, int8 or int4; a comma-separated list is measured alternately.")
    ] = "none",
    prompts: Annotated[str, Option("Prompt lengths, for prefill.")] = "128,512",
    batches: Annotated[str, Option("Batch sizes, for decode.")] = "1,4,16,32",
    steps: Annotated[int, Option("Decode steps in one run.")] = 16,
    runs: Annotated[int, Option("Runs of each setting; medians are shown.")] = 5,
    kv_cache_dtype: KvDtype = "auto",
    activation_dtype: Annotated[
        str, Option("auto or int8; a comma-separated list is measured alternately.")
    ] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Measure prefill and decode throughput of the engine, and the overhead of a step.

    The overhead is the CPU time of the engine thread outside of forward pass and sampling.
    """
    from benchmarks.engine.throughput import EngineBench, Rate, run

    made = parse_names(kernels), parse_names(quantize)
    sizes = parse_numbers(prompts), parse_numbers(batches)
    activations = parse_names(activation_dtype)
    what = EngineBench(
        model, dtype, threads, *made, *sizes, steps, runs, kv_cache_dtype, activations, device
    )
    with console(stderr=True).status("measuring") as status:

        def on_rate(rate: Rate) -> None:
            status.update(f"{rate.phase} {rate.size}: {rate.median_tokens_per_s:.1f} tokens/s")

        figures = run(what, on_rate)
    rates = [asdict(rate) for rate in figures.rates]
    costs = [asdict(cost) for cost in figures.steps]
    show_table(f"{model}, medians of {runs} runs", rates)
    show_table("CPU time of the engine's thread in a decode step, medians", costs)
    write_json(json_file, {"model": model, "rates": rates, "steps": costs})
