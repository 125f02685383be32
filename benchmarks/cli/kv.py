"""`python -m benchmarks kv`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from baton.core.errors import InvalidConfig
from baton.core.options import Option
from baton.core.units import parse_bytes


def kv(
    paths: Annotated[
        str, Option("Comma-separated transports, each with an optional UCX_TLS: nixl:tcp.")
    ] = "nixl,nixl:tcp,ucxx,ucxx:tcp",
    blocks: Annotated[str, Option("Block sizes.")] = ("16KiB,32KiB,64KiB,256KiB,1MiB,1792KiB"),
    sizes: Annotated[str, Option("Hand-off sizes.")] = "1MiB,8MiB,32MiB,64MiB",
    layers: Annotated[int, Option("Layers in a block.")] = 28,
    chunks: Annotated[int, Option("Prefill chunks in the measurement of the tail.")] = 4,
    chunk_ms: Annotated[float, Option("Milliseconds that a chunk computes.")] = 50.0,
    runs: Annotated[int, Option("Runs of each setting; medians are shown.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Measure KV transfer between two processes, with a contiguous NIXL write and memcpy.

    All times start with the first posted write. written: the prefill side has seen the last
    write complete. landed: the decode side has seen data and Done and may decode. verified: the
    same with digests on both sides. See docs/handoff-figures.md.
    """
    from benchmarks.kv.benchmark import KvBench, run

    what = KvBench(
        paths=[_path(one) for one in paths.split(",")],
        block_bytes=[parse_bytes(one) for one in blocks.split(",")],
        handoff_bytes=[parse_bytes(one) for one in sizes.split(",")],
        num_layers=layers,
        num_chunks=chunks,
        chunk_s=chunk_ms / 1e3,
        num_runs=runs,
    )
    with console(stderr=True).status("starting") as status:
        figures, tails = run(what, lambda done: status.update(f"measured {done}"))
    show_table(
        f"GB/s (share of the contiguous write) and µs, medians of {runs} rounds",
        [_with_shares(row) for row in figures],
    )
    tail_rows = [asdict(tail) for tail in tails]
    show_table("KV transfer left after the last chunk", tail_rows)
    write_json(json_file, {"transfers": figures, "tails": tail_rows})


def _with_shares(row: dict[str, object]) -> dict[str, object]:
    """Append to each rate its ratio, in parentheses."""
    return {
        name: f"{value:.2f} ({row[f'{name}_ratio']:.2f})" if f"{name}_ratio" in row else value
        for name, value in row.items()
        if not name.endswith("_ratio")
    }


def _path(text: str) -> tuple[str, str]:
    transport, _, tls = text.strip().partition(":")
    if transport not in ("nixl", "ucxx"):
        raise InvalidConfig(f"{text!r}: the transport is nixl or ucxx")
    return transport, tls
