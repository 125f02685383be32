"""`baton bench`: measurements, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.bench_chaos import chaos
from baton.cli.bench_chart import chart
from baton.cli.bench_forms import forms
from baton.cli.bench_frontier import frontier
from baton.cli.bench_handover import handover
from baton.cli.bench_interference import interference
from baton.cli.bench_memory import memory
from baton.cli.bench_overload import overload
from baton.cli.bench_peer import peer
from baton.cli.bench_router import router
from baton.cli.bench_serve import serve
from baton.cli.bench_speculation import speculation
from baton.cli.bench_trace import trace
from baton.cli.examples import examples
from baton.cli.options import JsonFile, check_writable_file
from baton.cli.show import show_table
from baton.units import parse_bytes
from engine.errors import InvalidConfig

bench = typer.Typer(no_args_is_help=True)
bench.command()(peer)
bench.command()(router)
bench.command(
    epilog=examples(
        "baton bench chaos --minutes 20 --every 5",
        "baton bench chaos --kinds kill --roles decode --logs logs",
    )
)(chaos)
bench.command(epilog=examples("baton bench memory --requests 100000 --clients 64"))(memory)
bench.command(epilog=examples("baton bench overload --model models/demo --factor 3"))(overload)
bench.command(
    epilog=examples("baton bench interference --model ~/models/Qwen3-0.6B --vllm-venv ~/vllm")
)(interference)
bench.command(
    epilog=examples("baton bench frontier --model ~/models/Qwen3-0.6B --rates 0.1,0.2 --plot f.png")
)(frontier)
bench.command(epilog=examples("baton bench handover --model ~/models/Qwen3-0.6B --pairs 30"))(
    handover
)
bench.command(
    epilog=examples("baton bench chart --peer peer.json --interference load.json engines.png")
)(chart)
bench.command(epilog=examples("baton bench speculation --speculative ngram:6"))(speculation)
bench.command(epilog=examples("baton bench forms --model models/demo --runs 20"))(forms)
bench.command()(trace)
bench.command(
    epilog=examples(
        "baton bench serve --address 127.0.0.1:50051 --rates 1,2,4,8 --plots plots",
        "baton bench serve --model models/demo --compare colocated --prompt-tokens mix:32x9,768x1",
    )
)(serve)


@bench.callback()
def in_order() -> None:
    """Measure the parts of Baton, and compare it with other engines."""
    # SIGTERM unwinds the stack, so that processes started for a measurement end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@bench.command()
def scheduler(
    running: Annotated[str, typer.Option(help="Batch sizes.")] = "256,1024",
    waiting: Annotated[int, typer.Option(help="Length of the waiting queue.")] = 10_000,
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "128,8192",
    json_file: JsonFile = None,
) -> None:
    """Measure the cost of a scheduler step in µs per decoding request."""
    from baton.bench.scheduler import run

    figures = run(numbers(running), waiting, numbers(contexts))
    rows = [row for rows in figures.values() for row in rows]
    show_table("one schedule and one update, medians", rows)
    _write(json_file, figures)


@bench.command()
def engine(
    model: Annotated[
        str, typer.Option(help="Model folder, or a name on the Hugging Face hub.")
    ] = "models/demo",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="Number of torch threads.")] = None,
    kernels: Annotated[
        str,
        typer.Option(help="auto, native or torch; a comma-separated list is measured alternately."),
    ] = "auto",
    quantize: Annotated[
        str,
        typer.Option(help="none, int8 or int4; a comma-separated list is measured alternately."),
    ] = "none",
    prompts: Annotated[str, typer.Option(help="Prompt lengths, for prefill.")] = "128,512",
    batches: Annotated[str, typer.Option(help="Batch sizes, for decode.")] = "1,4,16,32",
    steps: Annotated[int, typer.Option(help="Decode steps in one run.")] = 16,
    runs: Annotated[int, typer.Option(help="Runs of each setting; medians are shown.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure prefill and decode throughput of the engine, and the overhead of a step.

    The overhead is the CPU time of the engine thread outside of forward pass and sampling.
    """
    from baton.bench.engine import EngineBench, Rate, run

    made = _names(kernels), _names(quantize)
    sizes = numbers(prompts), numbers(batches)
    what = EngineBench(model, dtype, threads, *made, *sizes, steps, runs)
    with Console(stderr=True).status("measuring") as status:

        def on_rate(rate: Rate) -> None:
            status.update(f"{rate.phase} {rate.size}: {rate.median_tokens_per_s:.1f} tokens/s")

        figures = run(what, on_rate)
    rates = [asdict(rate) for rate in figures.rates]
    costs = [asdict(cost) for cost in figures.steps]
    show_table(f"{model}, medians of {runs} runs", rates)
    show_table("CPU time of the engine's thread in a decode step, medians", costs)
    _write(json_file, {"model": model, "rates": rates, "steps": costs})


@bench.command()
def kv(
    paths: Annotated[
        str,
        typer.Option(help="Comma-separated transports, each with an optional UCX_TLS: nixl:tcp."),
    ] = "nixl,nixl:tcp,ucxx,ucxx:tcp",
    blocks: Annotated[str, typer.Option(help="Block sizes.")] = (
        "16KiB,32KiB,64KiB,256KiB,1MiB,1792KiB"
    ),
    sizes: Annotated[str, typer.Option(help="Hand-off sizes.")] = "1MiB,8MiB,32MiB,64MiB",
    layers: Annotated[int, typer.Option(help="Layers in a block.")] = 28,
    chunks: Annotated[int, typer.Option(help="Prefill chunks in the measurement of the tail.")] = 4,
    chunk_ms: Annotated[float, typer.Option(help="Milliseconds that a chunk computes.")] = 50.0,
    runs: Annotated[int, typer.Option(help="Runs of each setting; medians are shown.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Measure KV transfer between two processes, with a contiguous NIXL write and memcpy.

    All times start with the first posted write. written: the prefill side has seen the last
    write complete. landed: the decode side has seen data and Done and may decode. verified: the
    same with digests on both sides. See docs/handoff-figures.md.
    """
    from baton.bench.kv import KvBench, run

    what = KvBench(
        paths=[_path(one) for one in paths.split(",")],
        block_bytes=[parse_bytes(one) for one in blocks.split(",")],
        handoff_bytes=[parse_bytes(one) for one in sizes.split(",")],
        num_layers=layers,
        num_chunks=chunks,
        chunk_s=chunk_ms / 1e3,
        num_runs=runs,
    )
    with Console(stderr=True).status("starting") as status:
        figures, tails = run(what, lambda done: status.update(f"measured {done}"))
    rows = [asdict(figure) for figure in figures]
    show_table(
        f"GB/s (share of the contiguous write) and µs, medians of {runs} rounds",
        [_with_shares(row) for row in rows],
    )
    tail_rows = [asdict(tail) for tail in tails]
    show_table("KV transfer left after the last chunk", tail_rows)
    _write(json_file, {"transfers": rows, "tails": tail_rows})


def _with_shares(row: dict[str, object]) -> dict[str, object]:
    """Append to each rate its ratio, in parentheses."""
    return {
        name: f"{value:.2f} ({row[f'{name}_ratio']:.2f})" if f"{name}_ratio" in row else value
        for name, value in row.items()
        if not name.endswith("_ratio")
    }


@bench.command()
def policies(
    nodes: Annotated[
        int, typer.Option(min=2, help="Number of nodes; half of them are prefill nodes.")
    ] = 1000,
    requests: Annotated[
        int, typer.Option(min=100, help="Number of requests; the first third is warm-up.")
    ] = 6000,
    load: Annotated[
        float,
        typer.Option(
            help="Load, relative to the capacity of the prefill nodes without prefix hits."
        ),
    ] = 0.7,
    skew: Annotated[
        float, typer.Option(help="Zipf exponent of the popularity of system prompts.")
    ] = 1.1,
    seed: Annotated[int, typer.Option(help="Same seed, same figures.")] = 0,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw the figures to this PNG.", callback=check_writable_file),
    ] = None,
) -> None:
    """Compare the routing policies on a simulated cluster by hit rate and waiting time."""
    from baton.bench.plotting import need_matplotlib
    from baton.bench.policies import PolicyBench, plot, run

    if plot_file is not None:
        need_matplotlib()
    what = PolicyBench(num_nodes=nodes, num_requests=requests, load=load, skew=skew, seed=seed)
    with Console(stderr=True).status("simulating") as status:
        figures = run(what, lambda done: status.update(f"simulated {done.policy}"))
    rows = [asdict(figure) for figure in figures]
    show_table(f"{nodes} simulated nodes, {requests} requests, seed {seed}", rows)
    _write(json_file, {"cluster": asdict(what), "policies": rows})
    if plot_file is not None:
        plot(figures, plot_file)


def _path(text: str) -> tuple[str, str]:
    transport, _, tls = text.strip().partition(":")
    if transport not in ("nixl", "ucxx"):
        raise InvalidConfig(f"{text!r}: the transport is nixl or ucxx")
    return transport, tls


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def numbers(written: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(one) for one in written.split(","))
    except ValueError:
        raise InvalidConfig(f"{written!r} is not a list of numbers; write it like 1,4,16") from None
    if min(numbers) < 1:
        raise InvalidConfig(f"{written!r}: every number must be at least 1")
    return numbers


def _write(path: Path | None, figures: object) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
