"""`baton bench chaos`."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options import JsonFile
from baton.cli.show import console, show_table
from engine.errors import InvalidConfig

if TYPE_CHECKING:
    from baton.bench.chaos import ChaosBench, OnProgress, Progress
    from baton.bench.chaos_bystander import Bystanders, Memory
    from baton.bench.chaos_report import Report

EVERYTHING = "all"


def chaos(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    minutes: Annotated[float, typer.Option(help="How long things go wrong.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests and same faults.")] = 0,
    every: Annotated[float, typer.Option(help="Seconds from fault to fault, on average.")] = 5.0,
    kinds: Annotated[
        str,
        typer.Option(
            help="kill, stop, freeze, slow, cut, hush, crowd, drop, late, double, swap, corrupt, "
            "jump, hostile; commas between. hostile is a client that does the worst that the "
            "limits allow, while bystanders' waits are measured."
        ),
    ] = EVERYTHING,
    roles: Annotated[
        str, typer.Option(help="Who is struck: router, prefill, decode; commas between.")
    ] = EVERYTHING,
    attacks: Annotated[
        str,
        typer.Option(
            help="Of the hostile client: large-answers, token-lists, large-settings, "
            "idle-connections, long-ids, ambiguous-grammars, dead-peers, mutations."
        ),
    ] = EVERYTHING,
    clients: Annotated[int, typer.Option(min=1, help="Each asks on and on.")] = 6,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill nodes.")] = 2,
    decode: Annotated[int, typer.Option(min=2, help="Decode nodes.")] = 2,
    kv_cache_memory: Annotated[
        str, typer.Option(help="Of each node; small enough for a crowd to fill it.")
    ] = "3MiB",
    dtype: Annotated[
        str,
        typer.Option(help="Choose float32 where there is no C++ compiler: there rounding decides."),
    ] = "auto",
    transport: Annotated[str, typer.Option(help="What carries KV: nixl or ucxx.")] = "nixl",
    kv_tls: Annotated[str, typer.Option(help="What UCX may use, such as tcp.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Folder for what the processes log.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Kill, stop and cut off a cluster's processes under load, and judge every answer.

    With hostile among the kinds, a client of its own sends bodies that ask for much, long lists and
    ids, ambiguous grammars, hundreds of idle connections, links to dead peers and mutated
    requests. Bystanders' streams must have no gap above 1 s, nor /health a latency above 1 s,
    except beside the other faults. `--kinds hostile` has no other faults.

    Ends with 1 when an answer was wrong, a request hung or was lost, something leaked, or a
    bystander's bound was missed.
    """
    from baton.bench.chaos import ChaosBench
    from baton.bench.chaos_clock import can_jump
    from baton.bench.chaos_faults import Kind, Role, Script
    from baton.bench.chaos_stage import Setting
    from baton.bench.hostile_bodies import Attack

    chosen = _named(Kind, kinds, "--kinds")
    if kinds == EVERYTHING and not can_jump():
        console(stderr=True).print("no C compiler here: clocks do not jump in this run")
        chosen = tuple(kind for kind in chosen if kind is not Kind.JUMP)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    what = ChaosBench(
        setting=Setting(
            model,
            prefill,
            decode,
            node_arguments=(
                *("--kv-cache-memory", kv_cache_memory, "--threads", "1", "--dtype", dtype),
                *("--kv-transport", transport, f"--kv-tls={kv_tls}"),
            ),
            log_dir=logs,
            clocks_jump=Kind.JUMP in chosen,
            has_http=Kind.HOSTILE in chosen,
        ),
        script=Script(
            seed=seed,
            duration_s=minutes * 60,
            every_s=every,
            kinds=chosen,
            roles=_named(Role, roles, "--roles"),
        ),
        num_clients=clients,
        attacks=_named(Attack, attacks, "--attacks"),
    )
    found = _run(what)
    _tell(found, what)
    if json_file is not None:
        from baton.bench.chaos_report import as_told

        told = {"what": asdict(what), **as_told(found)}
        json_file.write_text(json.dumps(told, indent=2, default=str) + "\n", encoding="utf-8")
    if not found.is_good:
        raise typer.Exit(1)


def _named(enum: type[Enum], written: str, option: str) -> tuple[Any, ...]:
    if written == EVERYTHING:
        return tuple(enum)
    try:
        return tuple(enum(one.strip()) for one in written.split(","))
    except ValueError:
        names = ", ".join(one.value for one in enum)
        raise InvalidConfig(f"{option} {written}: choose from {names}") from None


def _run(what: ChaosBench) -> Report:
    import asyncio

    from baton.bench.chaos import run

    async def until_interrupted() -> Report:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        try:
            with _progress(what) as on_progress:
                return await run(what, stop, on_progress)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    return asyncio.run(until_interrupted())


@contextmanager
def _progress(what: ChaosBench) -> Iterator[OnProgress]:
    """One line that is kept true on a terminal; nothing elsewhere."""
    with console(stderr=True).status("starting the cluster; asking with nothing wrong") as status:

        def on_progress(now: Progress) -> None:
            counts = Counter(one.outcome.value for one in now.told)
            told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            clock = f"{now.elapsed_s:.0f}/{what.script.duration_s:.0f} s"
            status.update(f"{clock}, {now.num_struck} faults ({now.latest}): {told}")

        yield on_progress


def _tell(found: Report, what: ChaosBench) -> None:
    rows = [{"what": name, "count": count} for name, count in found.counts.items()]
    took = f"{found.num_faults} faults in {found.elapsed_s:.0f} s, seed {what.script.seed}"
    console().print(took)
    show_table("", rows)
    if found.num_by_fault:
        show_table("faults", [{"fault": n, "times": c} for n, c in found.num_by_fault.items()])
    if found.recoveries:
        show_table("how soon it went on", [asdict(one) for one in found.recoveries])
    if found.reasons:
        show_table("what failed", [{"why": n, "times": c} for n, c in found.reasons.items()])
    if found.bystanders is not None:
        _tell_of_bystanders(found.bystanders)
    if found.memory:
        show_table("memory in MiB", [_memory_row(one) for one in found.memory])
    for name in ("wrong", "hung", "lost", "overdue", "leaks", "died", "missed"):
        _list(name, getattr(found, name))


def _tell_of_bystanders(found: Bystanders) -> None:
    named = {
        "worst gap": found.worst_gap_s,
        "worst /health": found.worst_health_s,
        "worst gap without an attack": found.worst_quiet_gap_s,
        "worst /health without an attack": found.worst_quiet_health_s,
        "worst lag of the measuring process": found.worst_lag_s,
    }
    counts = f"{found.num_gaps} gaps, {found.num_health} of /health; 0 is below 0.1 s"
    show_table(f"bystanders: {counts}", [{"what": n, "s": s} for n, s in named.items()])
    if found.by_attack:
        show_table("beside attacks", [asdict(one) for one in found.by_attack])


def _memory_row(one: Memory) -> dict[str, Any]:
    grown = f"{one.growth:+.0%}{'' if one.is_within else ' (over)'}"
    return {
        "process": one.process,
        "start": "restarted" if one.start_mib is None else round(one.start_mib),
        "before the second half": round(one.middle_mib),
        "end": round(one.end_mib),
        "growth": grown,
    }


def _list(name: str, lines: Sequence[str]) -> None:
    for line in lines:
        console(stderr=True).print(f"{name}: {line}", markup=False, highlight=False)
