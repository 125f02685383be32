"""`python -m benchmarks vision`."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options.model import Threads
from baton.cli.options.output import JsonFile
from baton.cli.show import show_table, write_json
from baton.core.errors import InvalidConfig


def vision(
    shape: Annotated[
        str, typer.Option(help="Tower with random weights: siglip-base, qwen2.5-vl or qwen3-vl.")
    ] = "siglip-base",
    layers: Annotated[int | None, typer.Option(min=1, help="Default: as published.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    quantize: Annotated[
        str, typer.Option(help="none or int8: weights of Baton and llama.cpp.")
    ] = "none",
    llamacpp_venv: Annotated[
        Path | None,
        typer.Option(help="Virtual environment with llama-cpp-python and its libmtmd."),
    ] = None,
    threads: Threads = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Measure the time that a vision tower takes for a picture, alternating with transformers.

    Pictures have 512x512 pixels, or 504x504 (qwen2.5-vl). CPU time of all threads is compared,
    since other load distorts it less than elapsed time. With --llamacpp-venv, Baton and llama.cpp
    read the same GGUF files; MTMD_CPP_LIB names the folder of a libmtmd outside of it.
    """
    from benchmarks.vision.benchmark import DTYPES, SHAPES, VisionBench, run

    if shape not in SHAPES:
        raise InvalidConfig(f"--shape {shape}: choose from {', '.join(SHAPES)}")
    if dtype not in DTYPES:
        raise InvalidConfig(f"--dtype {dtype}: choose from {', '.join(DTYPES)}")
    if quantize not in ("none", "int8"):
        raise InvalidConfig(f"--quantize {quantize}: choose from none, int8")
    bench = VisionBench(shape, layers, dtype, threads or 2, rounds, quantize, llamacpp_venv)
    with tempfile.TemporaryDirectory() as folder:
        rows = [asdict(figure) for figure in run(bench, Path(folder))]
    show_table(f"{shape}, {dtype}, weights {quantize}, {bench.num_threads} threads", rows)
    write_json(json_file, rows)
