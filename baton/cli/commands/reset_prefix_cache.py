"""`baton reset-prefix-cache`: clear the prefix caches of a cluster's nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from baton.cli.options.connection import connect
from baton.cli.signatures import inherit_options
from baton.core.options import SECURITY, Option
from baton.kv_transfer.external_kv import TIERS
from baton.rpc.security.operators import read_operator_tokens

ALL = "all"


@inherit_options(connect)
def reset_prefix_cache(
    tiers: Annotated[
        list[str] | None,
        Option(
            "What to clear: kv (the KV cache), host, file, object or all; may be repeated. Tiers "
            "hold copies: while they are kept, prompts are loaded again. Files and objects are "
            "deleted for all hosts.",
            flags=("--tier",),
        ),
    ] = None,
    operator_token_file: Annotated[
        Path | None,
        Option(
            "File with an operator's token in its first line, as the cluster's router and nodes "
            "have it.",
            SECURITY,
        ),
    ] = None,
    **given: Any,
) -> None:
    """Clear the prefix cache of every node; running requests are not affected."""
    import asyncio

    async def reset() -> dict[str, dict[str, int]]:
        chosen = [] if not tiers or ALL in tiers else tiers
        operators = read_operator_tokens(operator_token_file)
        token = operators.tokens[0] if operators is not None else None
        async with connect(**given) as client:
            return await client.reset_prefix_caches(chosen, token)

    for node_id, num_blocks in asyncio.run(reset()).items():
        counts = ", ".join(f"{num_blocks[tier]} {tier}" for tier in TIERS if tier in num_blocks)
        print(f"{node_id}: {counts or 'no'} blocks dropped")
