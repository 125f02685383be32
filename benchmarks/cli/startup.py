"""`python -m benchmarks startup`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from benchmarks.partial_results import report_on_exit


def startup(
    model: Annotated[Path, typer.Option(help="GGUF file, or a model folder.", exists=True)],
    llamacpp_venv: Annotated[
        Path | None,
        typer.Option(help="Virtual environment with llama-cpp-python, for GGUF files."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each program.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure the time to the first token of `baton run` and `baton up`, with warm caches.

    The programs start in turns. That of `baton up` is streamed over HTTP. CPU time is that of all
    processes until then. Ratios are to llama-cpp-python, or to `baton run` without it.
    """
    from benchmarks.peers.startup import MeasuredStart, figures, programs, run

    starts: list[MeasuredStart] = []

    def report(is_whole: bool) -> None:
        found = [asdict(one) for one in figures(starts)]
        values = {"model": str(model), "is_whole": is_whole, "figures": found}
        write_json(json_file, {**values, "starts": [asdict(one) for one in starts]})
        show_table(f"{model}, medians of {rounds} rounds", found)

    with report_on_exit(starts, report), console(stderr=True).status("starting") as status:

        def on_start(start: MeasuredStart) -> None:
            starts.append(start)
            status.update(f"{start.program}: {start.first_token_s:.2f} s, {start.cpu_s:.2f} of CPU")

        run(programs(model, llamacpp_venv), rounds, on_start)
