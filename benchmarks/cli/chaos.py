"""`python -m benchmarks chaos`."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from baton.core.errors import InvalidConfig

if TYPE_CHECKING:
    from benchmarks.chaos.benchmark import ChaosBench, ChaosProgress, OnProgress
    from benchmarks.chaos.hostile.latencies import BystanderLatencies
    from benchmarks.chaos.leaks import ProcessMemory
    from benchmarks.chaos.report import Report

EVERYTHING = "all"
# Rows of encodings in memory: few, so that pictures take turns.
ENCODER_CACHE = "--encoder-cache-tokens=64"


def chaos(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    minutes: Annotated[float, typer.Option(help="Minutes during which faults are injected.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of requests and faults.")] = 0,
    every: Annotated[float, typer.Option(help="Mean seconds between faults.")] = 5.0,
    kinds: Annotated[
        str,
        typer.Option(
            help="kill, stop, freeze, slow, pause, cut, stall, overload, drop, late, double, swap, "
            "kill-rank, stop-rank, hang-rank, corrupt, jump, hostile, spoil, truncate, empty, "
            "block, down, silent, reset, loads, tenants, slow-disk, adapters, lend; "
            "comma-separated. hostile: a client sends the most expensive requests that the "
            "limits allow, while the latency of other clients is measured. From spoil on: "
            "faults of files and objects of the tiers, and resets; second turns, whose KV must "
            "be loaded, alone and next to a tenant beyond its quota; and a slow disk. adapters: "
            "an adapter is loaded, replaced and unloaded while in use. lend: a node offers the "
            "other kind of leg for a while."
        ),
    ] = EVERYTHING,
    roles: Annotated[
        str,
        typer.Option(
            help="Roles to inject faults into: router, prefill, decode, embed, encode, vllm; "
            "comma-separated."
        ),
    ] = EVERYTHING,
    attacks: Annotated[
        str,
        typer.Option(
            help="Attacks of the hostile client: large-answers, token-lists, large-settings, "
            "idle-connections, long-ids, ambiguous-grammars, dead-peers, kv-hints, embeddings, "
            "kv-events, adapters, more-adapters, histories, mutations."
        ),
    ] = EVERYTHING,
    clients: Annotated[
        int, typer.Option(min=1, help="Clients, each sending one request after the other.")
    ] = 6,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill nodes.")] = 2,
    decode: Annotated[int, typer.Option(min=2, help="Decode nodes.")] = 2,
    embed: Annotated[int, typer.Option(min=2, help="Nodes of an embedder, a further model.")] = 2,
    encode: Annotated[int, typer.Option(min=0, help="Nodes that encode pictures.")] = 0,
    ranks: Annotated[
        str,
        typer.Option(
            help="Processes of each prefill and decode node, such as 2, or 1,2 for prefill nodes "
            "of one and decode nodes of two. Unlike numbers need --dtype float32."
        ),
    ] = "1",
    vllm: Annotated[
        int,
        typer.Option(
            min=0,
            help="vLLM servers in place of prefill nodes, with --prefill 0 and --dtype float32. "
            "They are doubles, which refuse some prompts.",
        ),
    ] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Different requests.")] = 30,
    images: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the requests that ask about pictures of numbers; with a model that "
            "sees, such as models/demo-vision. Answers are also compared with an engine alone.",
        ),
    ] = 0.0,
    kv_cache_memory: Annotated[
        str, typer.Option(help="KV cache of each node; small, so that overload fills it.")
    ] = "3MiB",
    kv_host_memory: Annotated[
        str,
        typer.Option(
            help="Host memory of each node for KV below its KV cache, with files and objects that "
            "all nodes share behind it; empty: none."
        ),
    ] = "16MiB",
    kv_folder_size: Annotated[str, typer.Option(help="Limit of the files of all nodes.")] = "16MiB",
    real_blocks: Annotated[
        bool,
        typer.Option(
            "--real-blocks",
            help="Blocks of 1.75 MiB: a model with the KV of Qwen3-0.6B and few weights instead of "
            "--model, with larger caches. Only decode nodes have tiers, so that they load second "
            "turns while they decode.",
        ),
    ] = False,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    dtype: Annotated[
        str,
        typer.Option(
            help="Use float32 without a C++ compiler: rounding may change tokens otherwise."
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or int8, of all nodes.")] = "auto",
    speculative: Annotated[
        str, typer.Option(help="Speculative decoding of all nodes, such as suffix:4.")
    ] = "",
    speculative_model: Annotated[str, typer.Option(help="Folder of a draft head.")] = "",
    each_method: Annotated[
        bool,
        typer.Option(
            "--each-method",
            help="Run once with each method of speculative decoding, each for its share of the "
            "minutes: suffix, eagle3 and draft with the demo model, mtp with small models.",
        ),
    ] = False,
    transport: Annotated[str, typer.Option(help="KV transport: nixl or ucxx.")] = "nixl",
    kv_tls: Annotated[str, typer.Option(help="UCX_TLS of the KV transport, such as tcp.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Folder for the logs of the processes.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Kill, stop and partition a cluster's processes under load, and check every answer.

    Faults are injected from outside. Kind hostile adds a client that sends expensive bodies, long
    lists and ids, ambiguous grammars, hundreds of idle connections, links to dead peers, floods of
    the KV event sockets, damaged adapters, more adapters than places, growing histories and
    mutated requests. Meanwhile bystander streams must
    have no gap and /live no latency above 1 s, except during other faults. `--kinds hostile`
    injects no other faults.

    Exit code 1 if an answer was wrong, a request hung or was lost, something leaked, or a
    bystander's limit was exceeded.
    """
    from benchmarks.chaos.benchmark import ChaosBench
    from benchmarks.chaos.cluster_config import ChaosClusterConfig
    from benchmarks.chaos.faults import (
        RANK_FAULTS,
        STORAGE_FAULTS,
        TIER_LOAD,
        FaultKind,
        Script,
        TargetRole,
    )
    from benchmarks.chaos.hostile.requests import Attack
    from benchmarks.chaos.preloading import has_compiler

    chosen = _named(FaultKind, kinds, "--kinds")
    num_ranks = parse_num_ranks(ranks)
    if kinds == EVERYTHING:
        unable = RANK_FAULTS if num_ranks == (1, 1) else ()
        chosen = tuple(kind for kind in chosen if kind not in unable)
    preloading = (FaultKind.JUMP, FaultKind.SLOW_DISK)
    if kinds == EVERYTHING and not has_compiler():
        console(stderr=True).print("no C compiler found: this run has no jump and slow-disk faults")
        chosen = tuple(kind for kind in chosen if kind not in preloading)
    if kinds == EVERYTHING and not kv_host_memory:
        chosen = tuple(kind for kind in chosen if kind not in STORAGE_FAULTS | TIER_LOAD)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    bench = ChaosBench(
        num_requests=requests,
        images_share=images,
        setting=ChaosClusterConfig(
            model,
            prefill,
            decode,
            embed,
            encode,
            vllm,
            node_arguments=(
                f"--kv-cache-memory={kv_cache_memory}",
                "--threads=1",
                f"--dtype={dtype}",
                f"--kv-cache-dtype={kv_cache_dtype}",
                f"--kv-transport={transport}",
                f"--kv-tls={kv_tls}",
                *((ENCODER_CACHE,) if images else ()),
                *((f"--speculative={speculative}",) if speculative else ()),
                *((f"--speculative-model={speculative_model}",) if speculative_model else ()),
            ),
            log_dir=logs,
            clocks_jump=FaultKind.JUMP in chosen,
            has_hostile_client=FaultKind.HOSTILE in chosen,
            kv_host_memory=kv_host_memory,
            kv_folder_size=kv_folder_size,
            block_size=block_size,
            num_ranks=num_ranks,
            disk_slows=FaultKind.SLOW_DISK in chosen
            or (FaultKind.TENANTS in chosen and has_compiler()),
        ),
        script=Script(
            seed=seed,
            duration_s=minutes * 60,
            every_s=every,
            kinds=chosen,
            roles=_named(TargetRole, roles, "--roles"),
        ),
        num_clients=clients,
        attacks=_named(Attack, attacks, "--attacks"),
    )
    reports = _run_all(bench, json_file, real_blocks=real_blocks, each_method=each_method)
    if not all(report.is_good for report in reports):
        raise typer.Exit(1)


def parse_num_ranks(text: str) -> tuple[int, int]:
    """Return the numbers of processes of a prefill and a decode node. Raises InvalidConfig."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (1, 2) or min(sizes) < 1:
        raise InvalidConfig(f"--ranks {text!r}: write one number, or two as in 1,2")
    return sizes[0], sizes[-1]


def _named(enum: type[Enum], text: str, option: str) -> tuple[Any, ...]:
    if text == EVERYTHING:
        return tuple(enum)
    try:
        return tuple(enum(one.strip()) for one in text.split(","))
    except ValueError:
        names = ", ".join(one.value for one in enum)
        raise InvalidConfig(f"{option} {text}: choose from {names}") from None


def _run_all(
    bench: ChaosBench, json_file: Path | None, *, real_blocks: bool, each_method: bool
) -> list[Report]:
    """Run once, or with each method of speculation. Show the reports and write them."""
    from benchmarks.chaos.report import report_values

    with ExitStack() as stack:
        if real_blocks:
            from benchmarks.chaos.real_blocks import with_real_blocks

            bench = replace(bench, setting=stack.enter_context(with_real_blocks(bench.setting)))
        benches = [bench]
        if each_method:
            from benchmarks.chaos.draft_methods import with_each_method

            benches = stack.enter_context(with_each_method(bench))
        reports = [_run_and_show(each) for each in benches]
    pairs = zip(benches, reports, strict=True)
    values = [{"what": asdict(each), **report_values(found)} for each, found in pairs]
    write_json(json_file, {"methods": values} if each_method else values[0])
    return reports


def _run_and_show(bench: ChaosBench) -> Report:
    report = _run(bench)
    _show(report, bench)
    return report


def _run(bench: ChaosBench) -> Report:
    import asyncio

    from benchmarks.chaos.benchmark import run

    async def until_interrupted() -> Report:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stop.set)
        try:
            with _progress(bench) as on_progress:
                return await run(bench, stop, on_progress)
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    return asyncio.run(until_interrupted())


@contextmanager
def _progress(bench: ChaosBench) -> Iterator[OnProgress]:
    """Show one status line on a terminal; print nothing elsewhere."""
    with console(stderr=True).status("starting the cluster; running without faults") as status:

        def on_progress(now: ChaosProgress) -> None:
            counts = Counter(one.outcome.value for one in now.outcomes)
            outcomes = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            clock = f"{now.elapsed_s:.0f}/{bench.script.duration_s:.0f} s"
            status.update(f"{clock}, {now.num_injected} faults ({now.latest}): {outcomes}")

        yield on_progress


def _show(found: Report, bench: ChaosBench) -> None:
    rows = [{"what": name, "count": count} for name, count in found.counts.items()]
    took = f"{found.num_faults} faults in {found.elapsed_s:.0f} s, seed {bench.script.seed}"
    console().print(took)
    show_table("", rows)
    by_kind = [{"request": n, "right": c} for n, c in sorted(found.num_by_kind.items())]
    show_table("right answers", by_kind)
    if found.num_by_fault:
        show_table("faults", [{"fault": n, "times": c} for n, c in found.num_by_fault.items()])
    if found.evidence:
        show_table("what they did", [asdict(one) for one in found.evidence])
    if found.loads:
        show_table("loads of second turns", [asdict(one) for one in found.loads])
    if found.recoveries:
        show_table("recovery times", [asdict(one) for one in found.recoveries])
    if found.reasons:
        show_table("failures", [{"why": n, "times": c} for n, c in found.reasons.items()])
    if found.bystanders is not None:
        _show_bystanders(found.bystanders)
    if found.memory:
        show_table("memory in MiB", [_memory_row(one) for one in found.memory])
    for name in ("wrong", "hung", "lost", "overdue", "leaks", "died", "missed", "skipped"):
        _list(name, getattr(found, name))


def _show_bystanders(found: BystanderLatencies) -> None:
    named = {
        "worst gap": found.worst_gap_s,
        "worst /live": found.worst_health_s,
        "worst gap without an attack": found.worst_quiet_gap_s,
        "worst /live without an attack": found.worst_quiet_health_s,
        "worst lag of the measuring process": found.worst_lag_s,
    }
    counts = f"{found.num_gaps} gaps, {found.num_health} /live requests; 0: below 0.1 s"
    show_table(f"bystanders: {counts}", [{"what": n, "s": s} for n, s in named.items()])
    if found.by_attack:
        show_table("during attacks", [asdict(one) for one in found.by_attack])


def _memory_row(one: ProcessMemory) -> dict[str, Any]:
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
