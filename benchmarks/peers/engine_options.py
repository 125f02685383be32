"""Options that select the engines of a comparison: Baton and vLLM, colocated or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options.output import check_writable_file
from baton.core.errors import InvalidConfig

if TYPE_CHECKING:
    from benchmarks.peers.completions_api import CompletionsApi
    from benchmarks.peers.warm_engines import Start

OWN = "default"
SHIPPED, PATCHED, WITH_BATON = "shipped", "patched", "baton"

BenchModel = Annotated[str, typer.Option("--model", help="Model folder, used by all engines.")]
VllmVenv = Annotated[Path | None, typer.Option(help="Virtual environment with vLLM for the CPU.")]
BenchDevice = Annotated[
    str, typer.Option("--device", help="cpu, or cuda for prefill and decode nodes, which share it.")
]
BenchKernels = Annotated[str, typer.Option("--kernels", help="Kernels of Baton's nodes.")]
BatonSteps = Annotated[
    str,
    typer.Option(
        help="Target step durations of Baton's colocated node in ms, comma-separated; default: no "
        "target; empty: leave this engine out."
    ),
]
VllmChunks = Annotated[
    str,
    typer.Option(
        help="Token budgets of vLLM's steps, comma-separated; default: its own; empty: none."
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", help="Also draw the result to this PNG.", callback=check_writable_file),
]
VllmApart = Annotated[
    str,
    typer.Option(
        help="Also measure vLLM's prefill and decode servers over NIXL, comma-separated: shipped; "
        "patched: no NIXL progress thread, no spinning, separate cores; baton: vLLM's prefill "
        "server and a decode node of Baton's."
    ),
]


def chosen_engines(
    model: str,
    steps: str,
    venv: Path | None,
    chunks: str,
    apart: str,
    device: str = "cpu",
    kernels: str = "auto",
) -> dict[str, Start]:
    """Return the selected engines, those of Baton first. Raises InvalidConfig."""
    from benchmarks.peers import engines
    from benchmarks.peers.settings import python_of

    engines.core_halves()
    starts: dict[str, Start] = {
        "baton, prefill and decode": partial(engines.baton_disaggregated, model, device, kernels)
    }
    if device != "cpu" and (steps or chunks):
        raise InvalidConfig(
            "--device: colocated engines run on the CPU; pass --baton-steps '' --vllm-chunks ''"
        )
    starts |= _baton_colocated(model, steps)
    if venv is None and apart:
        raise InvalidConfig("--vllm-apart needs --vllm-venv")
    if venv is not None:
        python_of(venv)  # raises before anything is measured
        starts |= _vllm_engines(model, venv, chunks, apart, device)
    return starts


def _baton_colocated(model: str, steps: str) -> Iterator[tuple[str, Start]]:
    from benchmarks.cli.lists import parse_numbers
    from benchmarks.peers import engines

    for step in _parts(steps):
        if step == OWN:
            yield "baton, colocated", partial(engines.baton_colocated, model)
        else:
            start = partial(engines.baton_colocated, model, step_ms=parse_numbers(step)[0])
            yield f"baton, colocated, steps of {step} ms", start


def _vllm_engines(
    model: str, venv: Path, chunks: str, apart: str, device: str
) -> Iterator[tuple[str, Start]]:
    from benchmarks.cli.lists import parse_numbers
    from benchmarks.peers import engines

    for chunk in _parts(chunks):
        limit = None if chunk == OWN else parse_numbers(chunk)[0]
        name = f"vllm, colocated, steps of {chunk}"
        yield name, partial(engines.vllm_colocated, model, venv, limit)
    for kind in _parts(apart):
        if kind not in (SHIPPED, PATCHED, WITH_BATON):
            raise InvalidConfig(f"--vllm-apart {kind!r}: write shipped, patched, baton or several")
        if kind == WITH_BATON:
            if device != "cpu":
                raise InvalidConfig("--vllm-apart baton runs on the CPU")
            yield (
                "vllm prefill, baton decode",
                partial(engines.vllm_prefill_baton_decode, model, venv),
            )
            continue
        name = f"vllm, prefill and decode, {kind}"
        start = partial(engines.vllm_disaggregated, model, venv, device=device)
        yield name, partial(start, is_patched=kind == PATCHED)


def _parts(written: str) -> list[str]:
    return [part.strip() for part in written.split(",") if part.strip()]


def keep_engines_warm(
    engines: dict[str, Start], model: str, lifetime: ExitStack
) -> dict[str, Start]:
    """Start vLLM's servers once and freeze them between turns.

    Baton's start fast, and freezing would expire their leases. Raises InvalidConfig if the servers
    together need more memory than is free: the OOM killer would end one during the run.
    """
    from benchmarks.peers.warm_engines import keep_warm

    # Leases of a server that Baton reads from would expire, too.
    names = [name for name in engines if name.startswith("vllm,")]
    _need_memory_for(names, model)
    return {
        name: keep_warm(start, lifetime) if name in names else start
        for name, start in engines.items()
    }


def _need_memory_for(names: Sequence[str], model: str) -> None:
    from baton.core.units import format_bytes
    from baton.engine.runner.device.host_memory import free_host_bytes
    from benchmarks.peers.engines import vllm_server_bytes

    num_servers = sum(1 if "colocated" in name else 2 for name in names)
    needed, free = num_servers * vllm_server_bytes(model), free_host_bytes()
    if needed > free:
        raise InvalidConfig(
            f"--keep: {num_servers} vLLM servers need about {format_bytes(needed)} together, "
            f"{format_bytes(free)} are free: select fewer engines, or omit --keep"
        )


def announced(engines: dict[str, Start], report: Callable[[str], None]) -> dict[str, Start]:
    """Report each engine as it starts and is measured, and add its name to an error as a note."""

    def announcing(name: str, start: Start) -> Start:
        @contextmanager
        def turn() -> Iterator[CompletionsApi]:
            report(f"{name}: starting")
            try:
                with start() as api:
                    report(f"{name}: measuring")
                    yield api
            except BaseException as error:
                error.add_note(f"in the turn of {name}")
                raise

        return turn

    return {name: announcing(name, start) for name, start in engines.items()}
