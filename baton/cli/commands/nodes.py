"""`baton nodes`: live table of the nodes of a router, and orders to single ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.command import DefaultGroup
from baton.cli.examples import examples
from baton.cli.options.connection import (
    OperatorTokenFile,
    call_router,
    connect,
    operator_token,
)
from baton.cli.show import console
from baton.cli.signatures import inherit_options
from baton.core.errors import InvalidConfig
from baton.core.legs import LegKind, role_of
from baton.core.options import NETWORK, OUTPUT, Option
from baton.core.pause_mode import PauseMode
from baton.core.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from baton.client import AsyncClient
    from baton.client.node_status import NodeRates, Snapshot
    from baton.rpc.node_info import NodeStatus, NodeTotals, TierReport

STATE_STYLES = {"ready": "green", "unreachable": "red", "mismatched": "red"}
TO_THE_RIGHT = {
    "running", "waiting", "free blocks", "hit rate", "prompt tok/s", "new tok/s",
    "drafts accepted", "adapters", "encoder rows",
    "blocks", "used", "loaded", "stored", "evicted", "failed",
}  # fmt: skip

MAX_SHOWN_POSITIONS = 8  # of drafts

Draw = Callable[["Snapshot", Mapping[str, "NodeRates"]], None]


NodeName = Annotated[str, typer.Argument(help="Name or address of the node.")]
nodes = typer.Typer(cls=DefaultGroup, help="Show the nodes of a cluster, or change what they do.")
ROLES = {
    "prefill": [LegKind.PREFILL],
    "decode": [LegKind.DECODE],
    "both": [LegKind.PREFILL, LegKind.DECODE],
}


@nodes.command(name="set-legs", epilog=examples("baton nodes set-legs decode-1 prefill"))
@inherit_options(connect)
def set_legs(
    node: NodeName,
    role: Annotated[str, typer.Argument(help="prefill, decode or both.")],
    drain_timeout_s: Annotated[
        float,
        Option(
            "Seconds in which requests in progress may end there; then other nodes go on with "
            "them.",
            NETWORK,
            at_least=0,
        ),
    ] = 30.0,
    operator_token_file: OperatorTokenFile = None,
    **given: Any,
) -> None:
    """Let a node compute prompts, decode or both from now on, without a restart."""
    if role not in ROLES:
        raise InvalidConfig(f"a node cannot be {role!r}; give prefill, decode or both")
    token = operator_token(operator_token_file)
    legs = call_router(
        given, lambda client: client.set_legs(node, ROLES[role], drain_timeout_s, token)
    )
    print(f"{node} is a {role_of(legs)} node now")


@nodes.command(epilog=examples("baton nodes pause decode-1 --mode keep"))
@inherit_options(connect)
def pause(
    node: NodeName,
    mode: Annotated[
        PauseMode,
        Option(
            "Of the requests in progress: abort ends them, so that other nodes go on with them; "
            "wait lets those that hold KV blocks end; keep stops them until the node is resumed."
        ),
    ] = PauseMode.ABORT,
    operator_token_file: OperatorTokenFile = None,
    **given: Any,
) -> None:
    """Pause a node; it gets no new requests, and keeps weights and KV."""
    _set_pause(node, mode, operator_token_file, given)
    print(f"{node} is paused; resume it: baton nodes resume {node}")


@nodes.command(epilog=examples("baton nodes resume decode-1"))
@inherit_options(connect)
def resume(
    node: NodeName,
    operator_token_file: OperatorTokenFile = None,
    **given: Any,
) -> None:
    """Resume a paused node."""
    _set_pause(node, None, operator_token_file, given)
    print(f"{node} is resumed")


def _set_pause(
    node: str, mode: PauseMode | None, token_file: Path | None, given: dict[str, Any]
) -> None:
    token = operator_token(token_file)
    call_router(given, lambda client: client.set_pause(node, mode, token))


@nodes.command()
@inherit_options(connect)
def show(
    interval: Annotated[float, Option("Seconds between refreshes.", OUTPUT, at_least=0.1)] = 1.0,
    once: Annotated[bool, Option("Print once and exit.", OUTPUT, flags=("--once",))] = False,
    as_json: Annotated[
        bool, Option("Print one JSON object per refresh.", OUTPUT, flags=("--json",))
    ] = False,
    **given: Any,
) -> None:
    """Show the nodes with their state, load and throughput; Ctrl-C ends."""
    with _drawing(as_json, once) as draw:
        try:
            call_router(given, lambda client: _follow(client, 0.0 if once else interval, draw))
        except KeyboardInterrupt:
            return  # the normal end


async def _follow(client: AsyncClient, interval_s: float, draw: Draw) -> None:
    from baton.client.node_status import Snapshot, rates_between

    before: Snapshot | None = None
    async with aclosing(client.nodes(interval_s)) as updates:
        async for statuses in updates:
            now = Snapshot(time.monotonic(), statuses)
            draw(now, rates_between(before, now))
            before = now


@contextmanager
def _drawing(as_json: bool, once: bool) -> Iterator[Draw]:
    if as_json:
        yield lambda seen, rates: print(json.dumps(as_values(seen, rates)), flush=True)
        return
    screen = console()
    if once or not screen.is_terminal:
        yield lambda seen, rates: screen.print(*tables_of(seen, rates))
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=screen, auto_refresh=False) as live:
        yield lambda seen, rates: live.update(Group(*tables_of(seen, rates)), refresh=True)


def as_values(seen: Snapshot, rates: Mapping[str, NodeRates]) -> dict[str, Any]:
    rows = []
    for node in seen.nodes:
        rate, totals = rates.get(node.address), node.totals
        shares = {"hit_rate": totals.hit_rate, "acceptance_rate": totals.acceptance_rate}
        row = asdict(node)
        counts = row.pop("totals")
        rows.append({**row, **counts, **shares, **({} if rate is None else asdict(rate))})
    return {"nodes": rows}


def tables_of(seen: Snapshot, rates: Mapping[str, NodeRates]) -> list[Table]:
    """Return the table of nodes, and that of their tiers if there are any."""
    tiers = table_of_tiers(seen)
    return [table_of_nodes(seen, rates), *([tiers] if tiers.row_count else [])]


def table_of_nodes(seen: Snapshot, rates: Mapping[str, NodeRates]) -> Table:
    rows = [_row(node, rates.get(node.address)) for node in seen.nodes]
    for name, cell in COLUMNS_IF_ANY.items():
        if any(map(cell, seen.nodes)):
            for node, row in zip(seen.nodes, rows, strict=True):
                row[name] = cell(node)
    num_ready = sum(node.state == "ready" for node in seen.nodes)
    table = _table(f"{num_ready} of {len(rows)} nodes ready", rows)
    table.caption = "\n".join(unlike_kernels(seen.nodes)) or None
    return table


def unlike_kernels(nodes: Sequence[NodeStatus]) -> Iterator[str]:
    """Yield a note for each model that nodes compute with different kernels."""
    for model in sorted({node.model for node in nodes}):
        kernels = sorted({_kernels(node) for node in nodes if node.model == model} - {""})
        if len(kernels) > 1:
            yield f"{model}: tokens can differ between nodes with kernels {' and '.join(kernels)}"


def table_of_tiers(seen: Snapshot) -> Table:
    rows = [_tier_row(node, tier) for node in seen.nodes for tier in node.totals.tiers]
    return _table("tiers below the KV caches", rows)


def _table(title: str, rows: Sequence[Mapping[str, str | Text]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        justify: Any = "right" if name in TO_THE_RIGHT else "left"
        table.add_column(name, justify=justify, no_wrap=name != "reason")
    for row in rows:
        table.add_row(*row.values())
    return table


def _tier_row(node: NodeStatus, tier: TierReport) -> dict[str, str | Text]:
    hit_rate = node.totals.tier_hit_rate(tier)
    return {
        "address": node.address,
        "tier": tier.name,
        "blocks": str(tier.num_blocks),
        "used": f"{format_bytes(tier.num_bytes)} of {format_bytes(tier.max_bytes)}",
        "hit rate": "" if hit_rate is None else f"{hit_rate:.0%}",
        "loaded": str(tier.num_loaded_blocks),
        "stored": str(tier.num_stored_blocks),
        "evicted": str(tier.num_evicted_blocks),
        "failed": str(tier.num_failed_blocks),
    }


def _encoder_rows(node: NodeStatus) -> str:
    """Return how many rows of encodings of pictures are in memory, and how many fit."""
    totals = node.totals
    return f"{totals.num_encoder_rows}/{totals.max_encoder_rows}" if totals.max_encoder_rows else ""


def _adapters(node: NodeStatus) -> str:
    """Return how many adapters are in memory and known, and how many fit into a batch."""
    if not node.max_loras:
        return ""
    in_memory = {each.id for each in node.adapters.in_memory}
    num_known = len(in_memory | {adapter.id for adapter in node.adapters.named})
    return f"{len(in_memory)}/{num_known} (batch: {node.max_loras})"


def _kernels(node: NodeStatus) -> str:
    """Return which kernels compute the model, and in how many processes if these are several."""
    return f"{node.kernels} in {node.num_ranks} processes" if node.num_ranks > 1 else node.kernels


COLUMNS_IF_ANY: Mapping[str, Callable[[NodeStatus], str]] = {
    "adapters": _adapters,
    "encoder rows": _encoder_rows,
    "kernels": _kernels,
    "reason": lambda node: node.reason,
}


def _acceptance(totals: NodeTotals) -> str:
    """Return the share of accepted draft tokens, and that of the first positions in percent."""
    if totals.acceptance_rate is None:
        return ""
    counts = zip_longest(
        totals.accepted_by_position, totals.proposed_by_position[:MAX_SHOWN_POSITIONS], fillvalue=0
    )
    shares = (f"{100 * accepted / proposed:.0f}" for accepted, proposed in counts if proposed)
    return f"{totals.acceptance_rate:.0%} ({' '.join(shares)})"


def _row(node: NodeStatus, rates: NodeRates | None) -> dict[str, str | Text]:
    from rich.text import Text

    is_known = bool(node.node_id)
    hit_rate = node.totals.hit_rate

    def known(text: str) -> str:
        return text if is_known else ""

    return {
        "role": role_of(node.legs),
        "address": node.address,
        "state": Text(node.state, style=STATE_STYLES.get(node.state, "yellow")),
        "node": known(f"{node.node_id}/{node.incarnation}"),
        "running": known(str(node.num_running)),
        "waiting": known(str(node.num_waiting)),
        "free blocks": f"{node.num_free_blocks}/{node.num_blocks}" if node.num_blocks else "",
        "hit rate": "" if hit_rate is None else f"{hit_rate:.0%}",
        "prompt tok/s": "" if rates is None else f"{rates.prompt_tokens_per_s:.0f}",
        "new tok/s": "" if rates is None else f"{rates.sampled_tokens_per_s:.0f}",
        "drafts accepted": _acceptance(node.totals),
        "KV over": node.kv_transport,
        "model": node.model,
        "version": node.version,
    }
