"""`python -m benchmarks tiers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from baton.cli.options.output import JsonFile
from baton.cli.show import console, show_table, write_json
from baton.core.errors import InvalidConfig
from baton.core.units import parse_bytes

PARTS = ("copies", "decode", "prompts", "turns")


def tiers(
    model: Annotated[str, typer.Option(help="Model folder.")] = "models/demo",
    parts: Annotated[
        str, typer.Option(help="What to measure, of copies, decode, prompts and turns.")
    ] = ",".join(PARTS),
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a prompt.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")] = 5,
    kv_cache_memory: Annotated[
        str, typer.Option(help="KV cache of each node: more than one prompt, less than two.")
    ] = "1280KiB",
    host_memory: Annotated[
        str, typer.Option(help="Host tier, and KV cache of a peer: at least two prompts.")
    ] = "64MiB",
    small_host_memory: Annotated[
        str, typer.Option(help="Host memory in front of files: less than half a prompt.")
    ] = "128KiB",
    turns: Annotated[
        int, typer.Option(min=1, help="Second turns of long sessions, next to short ones.")
    ] = 20,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block, for turns.")] = 16,
    streams: Annotated[int, typer.Option(min=1, help="Decoding requests.")] = 4,
    steps: Annotated[int, typer.Option(min=10, help="Decode steps of half a round.")] = 100,
    moved: Annotated[
        float, typer.Option(min=0.001, help="GB/s that busy tiers store and load.")
    ] = 0.1,
    json_file: JsonFile = None,
) -> None:
    """Measure the tiers below the KV cache: copies, decoding next to them, and prompts.

    copies: stores to and loads from host memory, next to memcpy of the same blocks. decode: steps
    of decoding requests while tiers store and load, and without. prompts: the time to the first
    token of prompts that are computed, evicted and loaded again, or pulled back from the decode
    node; files are dropped from the page cache before they are read. turns: second turns of
    sessions, --tokens long and one block long, while other requests decode on the same node: the
    time to the first token next to that of the first turn, and the share of prefixes that are
    loaded rather than computed. Use a model with blocks of a real size, such as Qwen3-0.6B.
    """
    wanted = [part.strip() for part in parts.split(",")]
    if not set(wanted) <= set(PARTS):
        raise InvalidConfig(f"--parts {parts!r}: choose among {', '.join(PARTS)}")
    kept: dict[str, list[dict[str, Any]]] = {}
    with console(stderr=True).status("measuring"):
        if "copies" in wanted:
            kept["copies"] = _copies(rounds)
        if "decode" in wanted:
            kept["decode"] = _decode(model, kv_cache_memory, streams, steps, rounds, moved)
        if "prompts" in wanted:
            memories = kv_cache_memory, host_memory, small_host_memory
            kept["prompts"] = _prompts(model, memories, tokens, rounds)
        if "turns" in wanted:
            memories = kv_cache_memory, host_memory, small_host_memory
            kept["turns"] = _turns(model, memories, tokens, block_size, turns, streams)
    write_json(json_file, kept)


def _copies(rounds: int) -> list[dict[str, Any]]:
    from benchmarks.tiers.copies import run

    rows = [asdict(row) for row in run(rounds)]
    _show(f"copies of blocks, medians of {rounds} rounds", rows, list(rows[0]))
    return rows


def _decode(
    model: str, kv_cache_memory: str, streams: int, steps: int, rounds: int, moved: float
) -> list[dict[str, Any]]:
    from benchmarks.tiers.decode_latency import DecodeBench, run

    rows = []
    for with_files in (False, True):
        memory = parse_bytes(kv_cache_memory)
        row = run(DecodeBench(model, memory, moved, streams, steps, rounds, with_files))
        rows.append({"tiers": "host, files" if with_files else "host", **asdict(row)})
    _show(f"decode steps of {streams} requests, medians of {rounds} rounds", rows, list(rows[0]))
    return rows


def _prompts(
    model: str, memories: tuple[str, str, str], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    from baton.cluster import ClusterOptions
    from benchmarks.tiers.first_token import TiersBench, run

    kv_cache_memory, host_memory, small_host_memory = memories
    nodes = ("--kv-cache-memory", kv_cache_memory, "--trace-dir", "off")
    cluster = ClusterOptions(model, node_arguments=nodes)
    bench = TiersBench(cluster, host_memory, small_host_memory, tokens, rounds)
    rows = [asdict(row) for row in run(bench)]
    title = f"time to the first token of {tokens} tokens, medians of {rounds} rounds"
    _show(title, rows, ["tier", "computed_s", "loaded_s", "gain", "loaded_tokens"])
    return rows


def _turns(
    model: str,
    memories: tuple[str, str, str],
    tokens: int,
    block_size: int,
    num_long: int,
    num_streams: int,
) -> list[dict[str, Any]]:
    from baton.cluster import ClusterOptions
    from benchmarks.tiers.second_turns import TurnsBench, run

    kv_cache_memory, host_memory, small_host_memory = memories
    nodes = ("--kv-cache-memory", kv_cache_memory, "--block-size", str(block_size))
    cluster = ClusterOptions(model, node_arguments=(*nodes, "--trace-dir", "off"))
    bench = TurnsBench(
        cluster, host_memory, small_host_memory, block_size, tokens, num_long, num_streams
    )
    results = list(run(bench))
    rows = [asdict(each.row) for each in results]
    title = f"second turns of {tokens} tokens while {num_streams} requests decode"
    _show(title, rows, list(rows[0]))
    return [
        {**row, "seconds": [asdict(one) for one in each.seconds]}
        for row, each in zip(rows, results, strict=True)
    ]


def _show(title: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    show_table(title, [{name.replace("_", " "): row[name] for name in names} for row in rows])
