"""Which engines a measurement takes, as its options say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import InvalidConfig

if TYPE_CHECKING:
    from baton.bench.staying import Start
    from baton.bench.streams import Door

OWN = "default"
SHIPPED, PATCHED = "shipped", "patched"

BenchModel = Annotated[
    str, typer.Option("--model", help="Model folder; all engines read the same.")
]
VllmVenv = Annotated[
    Path | None, typer.Option(help="Environment that vLLM (for the CPU) is installed in.")
]
BatonSteps = Annotated[
    str,
    typer.Option(
        help="Milliseconds that steps of Baton's colocated node shall last; default: as many "
        "tokens as fit; empty: none."
    ),
]
VllmChunks = Annotated[
    str, typer.Option(help="Most tokens of its steps; default: its own choice; empty: none.")
]
VllmApart = Annotated[
    str,
    typer.Option(
        help="Its prefill and decode servers over NIXL, too: shipped, patched or both with a comma "
        "between; patched: no progress thread of NIXL's, no spinning, each on its own cores."
    ),
]


def chosen_engines(
    model: str, steps: str, venv: Path | None, chunks: str, apart: str
) -> dict[str, Start]:
    """Baton's first. Raises InvalidConfig."""
    from baton.bench import engines
    from baton.bench.peer_settings import python_of

    engines.halves()
    found: dict[str, Start] = {"baton, prefill and decode": partial(engines.baton_apart, model)}
    found |= _baton_colocated(model, steps)
    if venv is None and apart:
        raise InvalidConfig("--vllm-apart needs --vllm-venv")
    if venv is not None:
        python_of(venv)  # told before anything is measured
        found |= _vllm_engines(model, venv, chunks, apart)
    return found


def _baton_colocated(model: str, steps: str) -> Iterator[tuple[str, Start]]:
    from baton.bench import engines
    from baton.cli.bench import numbers

    for step in _parts(steps):
        if step == OWN:
            yield "baton, colocated", partial(engines.baton_colocated, model)
        else:
            start = partial(engines.baton_colocated, model, step_ms=numbers(step)[0])
            yield f"baton, colocated, steps of {step} ms", start


def _vllm_engines(model: str, venv: Path, chunks: str, apart: str) -> Iterator[tuple[str, Start]]:
    from baton.bench import engines
    from baton.cli.bench import numbers

    for chunk in _parts(chunks):
        limit = None if chunk == OWN else numbers(chunk)[0]
        name = f"vllm, colocated, steps of {chunk}"
        yield name, partial(engines.vllm_colocated, model, venv, limit)
    for kind in _parts(apart):
        if kind not in (SHIPPED, PATCHED):
            raise InvalidConfig(f"--vllm-apart {kind!r}: write shipped, patched or both")
        name = f"vllm, prefill and decode, {kind}"
        yield name, partial(engines.vllm_apart, model, venv, is_patched=kind == PATCHED)


def _parts(written: str) -> list[str]:
    return [part.strip() for part in written.split(",") if part.strip()]


def that_stay(engines: dict[str, Start], model: str, lifetime: ExitStack) -> dict[str, Start]:
    """vLLM's are started once; Baton's are quick, and watch clocks that freezing would upset.

    Raises InvalidConfig where memory does not hold all of them: the system would end one later.
    """
    from baton.bench.staying import staying

    names = [name for name in engines if name.startswith("vllm")]
    _need_memory_for(names, model)
    return {
        name: staying(start, lifetime) if name in names else start
        for name, start in engines.items()
    }


def _need_memory_for(names: Sequence[str], model: str) -> None:
    from baton.bench.engines import vllm_server_bytes
    from baton.units import format_bytes
    from engine.runner.host_memory import free_host_bytes

    num_servers = sum(1 if "colocated" in name else 2 for name in names)
    needed, free = num_servers * vllm_server_bytes(model), free_host_bytes()
    if needed > free:
        raise InvalidConfig(
            f"--keep: {num_servers} of vLLM's servers take about {format_bytes(needed)} together, "
            f"{format_bytes(free)} are free: ask for fewer engines at once, or leave --keep out"
        )


def announced(engines: dict[str, Start], tell: Callable[[str], None]) -> dict[str, Start]:
    """Who waits hears which engine starts and which is measured; an error, in whose turn it was."""

    def telling(name: str, start: Start) -> Start:
        @contextmanager
        def turn() -> Iterator[Door]:
            tell(f"{name}: starting")
            try:
                with start() as door:
                    tell(f"{name}: measuring")
                    yield door
            except BaseException as error:
                error.add_note(f"in the turn of {name}")
                raise

        return turn

    return {name: telling(name, start) for name, start in engines.items()}
