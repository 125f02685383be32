"""`python -m benchmarks embeddings`."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options.model import Threads
from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from baton.core.errors import InvalidConfig


def embeddings(
    model: Annotated[str, typer.Option(help="Folder of an embedder; empty: see --shape.")] = "",
    shape: Annotated[
        str, typer.Option(help="Shape of a decoder with random weights, instead of --model.")
    ] = "qwen3-0.6b",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of --shape. Default: as published.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of all engines.")] = "float32",
    threads: Threads = 1,
    peers: Annotated[
        str, typer.Option(help="Peers, which must be installed here: comma-separated.")
    ] = "sentence-transformers,fastembed,infinity",
    texts: Annotated[str, typer.Option(help="Numbers of texts in a call.")] = "1,8,64",
    total: Annotated[int, typer.Option(min=1, help="Texts of a round.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Measure embeddings per second of CPU time, alternating with other engines.

    The texts have 3 to 90 words. CPU time of all threads is compared, since other load distorts it
    less than elapsed time. The limit is the peak of large matrix products in the same rounds.
    """
    from benchmarks.cli.lists import parse_numbers
    from benchmarks.embeddings.benchmark import EmbeddingsBench, make_shape, run
    from benchmarks.embeddings.engines import DTYPES, PEERS

    chosen = tuple(filter(None, peers.split(",")))
    for name in chosen:
        if name not in PEERS:
            raise InvalidConfig(f"--peers {name}: choose from {', '.join(PEERS)}")
    if dtype not in DTYPES:
        raise InvalidConfig(f"--dtype {dtype}: choose from {', '.join(DTYPES)}")
    with ExitStack() as stack:
        if not model:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            make_shape(Path(folder), shape, layers, dtype)
        bench = EmbeddingsBench(
            model=Path(model or folder),
            dtype=dtype,
            num_threads=threads or 1,
            peers=chosen,
            counts=parse_numbers(texts),
            num_texts=total,
            num_rounds=rounds,
        )
        figures = run(bench, on_missing=console(stderr=True).print)
    rows = [asdict(figure) for figure in figures.rows]
    dtypes = " or ".join(dict.fromkeys((dtype, "float32")))
    limit = f"limit: {figures.peak_gflops:.1f} GFLOP/s of a {dtypes} product"
    show_table(f"{model or shape}, {dtype}, {threads} threads; {limit}", rows)
    write_json(json_file, asdict(figures))
