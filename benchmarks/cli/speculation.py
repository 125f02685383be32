"""`python -m benchmarks speculation`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.options.model import Dtype, Threads
from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json
from baton.core.errors import InvalidConfig


def speculation(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    speculative: Annotated[
        str, typer.Option(help="Value of --speculative, such as suffix:8.")
    ] = "suffix:8",
    speculative_model: Annotated[
        str, typer.Option(help="Folder of the head, or model, that drafts.")
    ] = "",
    dtype: Dtype = "auto",
    threads: Threads = 1,
    texts: Annotated[
        str,
        typer.Option(
            help="What is continued: source; edits, versions of a source; prediction, a source "
            "whose answer is predicted but for one token; noise, of which nothing is predictable."
        ),
    ] = "source",
    temperatures: Annotated[str, typer.Option(help="Temperatures; 0 is greedy.")] = "0,0.2,0.8",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 300,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 200,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each setting; medians are shown.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure the speed-up of speculative decoding, and compare the tokens."""
    from baton.engine.spec_decode.config import parse_speculation
    from benchmarks.cli.lists import parse_numbers

    chosen = parse_speculation(speculative)
    if chosen is None:
        raise InvalidConfig("nothing to measure: --speculative is empty")
    from benchmarks.engine.speculation import SpeculationBench, SpeedUp, run

    bench = SpeculationBench(
        model,
        chosen,
        speculative_model,
        dtype=dtype,
        num_threads=threads,
        texts=_texts(texts),
        temperatures=_temperatures(temperatures),
        batch_sizes=parse_numbers(batches),
        num_prompt_tokens=prompt,
        num_tokens=answer,
        num_runs=runs,
    )
    with Console(stderr=True).status("loading") as status:

        def on_figure(one: SpeedUp) -> None:
            setting = f"{one.text}, temperature {one.temperature}, batch {one.batch}"
            status.update(f"{setting}: {one.speed_up:.2f} times")

        figures = [asdict(one) for one in run(bench, on_figure)]
    show_table(f"{model}, {speculative}, medians of {runs} runs", figures)
    values = {"model": model, "speculative": speculative, "figures": figures}
    write_json(json_file, values)


def _texts(written: str) -> tuple[str, ...]:
    from benchmarks.engine.speculation import TEXTS

    texts = tuple(written.split(","))
    unknown = [text for text in texts if text not in TEXTS]
    if unknown:
        raise InvalidConfig(f"--texts {unknown[0]!r}: choose from {', '.join(TEXTS)}")
    return texts


def _temperatures(written: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in written.split(","))
    except ValueError:
        raise InvalidConfig(
            f"{written!r} is not a list of temperatures; write it like 0,0.7"
        ) from None
