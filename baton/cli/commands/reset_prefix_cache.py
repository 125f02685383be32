"""`baton reset-prefix-cache`: clear the prefix caches of a cluster's nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.options.connection import connect
from baton.cli.signatures import inherit_options
from baton.core.options import SECURITY
from baton.kv_transfer.external_kv import TIERS
from baton.rpc.security.operators import read_operator_tokens

ALL = "all"


@inherit_options(connect)
def reset_prefix_cache(
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            help="What to clear: kv (the KV cache), host, file, object or all; may be repeated. "
            "Tiers hold copies: while they are kept, prompts are loaded again. Files and objects "
            "are deleted for all hosts.",
        ),
    ] = None,
    operator_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with an operator's token in its first line, as the cluster's router and "
            "nodes have it.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    **given: Any,
) -> None:
    """Clear the prefix cache of every node; running requests are not affected."""
    import asyncio

    chosen = [] if not tiers or ALL in tiers else tiers
    num_blocks_by_node = asyncio.run(_reset(chosen, operator_token_file, given))
    for node_id, num_blocks in num_blocks_by_node.items():
        counts = ", ".join(f"{num_blocks[tier]} {tier}" for tier in TIERS if tier in num_blocks)
        print(f"{node_id}: {counts or 'no'} blocks dropped")


async def _reset(
    tiers: list[str], token_file: Path | None, for_connection: dict[str, Any]
) -> dict[str, dict[str, int]]:
    tokens = read_operator_tokens(token_file)
    async with connect(**for_connection) as client:
        num_blocks: dict[str, dict[str, int]] = await client.reset_prefix_caches(
            tiers, tokens and tokens.tokens[0]
        )
    return num_blocks
