"""`python -m benchmarks ranks`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from baton.core.options import Option
from benchmarks.cli.lists import parse_numbers


def ranks(
    model: Annotated[
        str, Option("Model folder, or a name on the Hugging Face hub.")
    ] = "models/demo",
    size: Annotated[int, Option("Processes, as --tensor-parallel-size of nodes.", at_least=2)] = 2,
    dtype: Annotated[str, Option("auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, Option("Threads of each process.", at_least=1)] = 1,
    prompts: Annotated[str, Option("Prompt lengths, for prefill.")] = "128,512",
    batches: Annotated[str, Option("Batch sizes, for decode.")] = "1,4,16",
    reduces: Annotated[str, Option("Sizes of all-reduces, in KiB.")] = "2,4,16,128,1024",
    runs: Annotated[int, Option("Runs of each setting; medians are shown.")] = 5,
    memory: Annotated[bool, Option("Measure the weights in memory, and no times.")] = False,
    expert_parallel: Annotated[
        bool, Option("With --memory: each process has some experts as they are.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure a node of several processes beside one process with as many threads.

    All-reduces are measured beside those of gloo. Each process needs a core of its own.
    """
    if memory:
        _measure_memory(model, size, dtype, threads, json_file, expert_parallel=expert_parallel)
        return
    from benchmarks.engine.ranks import RankRate, rank_rates, reduce_times
    from benchmarks.engine.throughput import EngineBench

    what = EngineBench(
        model,
        dtype,
        threads,
        prompt_lens=parse_numbers(prompts),
        batch_sizes=parse_numbers(batches),
        num_runs=runs,
    )
    with console(stderr=True).status("measuring all-reduces") as status:
        times = reduce_times(size, [1024 * kib for kib in parse_numbers(reduces)])

        def on_rate(rate: RankRate) -> None:
            status.update(f"{rate.phase} {rate.size}: {rate.ratio:.2f} of one process")

        rates = rank_rates(what, size, on_rate)
    reduced, compared = [asdict(each) for each in times], [asdict(each) for each in rates]
    show_table(f"All-reduce between {size} processes, us", reduced)
    show_table(f"{model}: {size} processes beside one, medians of {runs} runs", compared)
    write_json(json_file, {"model": model, "reduces": reduced, "rates": compared})


def _measure_memory(
    model: str,
    size: int,
    dtype: str,
    threads: int,
    json_file: Path | None,
    *,
    expert_parallel: bool,
) -> None:
    from baton.engine.runner.config import RunnerConfig
    from benchmarks.engine.rank_memory import rank_memory

    config = RunnerConfig(
        model=model,
        dtype=dtype,
        num_threads=threads,
        tensor_parallel_size=size,
        enable_expert_parallel=expert_parallel,
    )
    rows = [asdict(each) for each in rank_memory(config)]
    show_table(f"{model}: weights in the private memory of each process", rows)
    write_json(json_file, {"model": model, "memory": rows})
