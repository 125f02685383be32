"""`baton reset-prefix-cache`: empty the prefix caches of a cluster's nodes."""

from __future__ import annotations

from typing import Any

from baton.cli.connection import connect
from baton.cli.signatures import takes_options_of


@takes_options_of(connect)
def reset_prefix_cache(**given: Any) -> None:
    """Have every node forget its cached prefixes; requests under way are not disturbed."""
    import asyncio

    num_blocks_by_node = asyncio.run(_reset(given))
    for node_id, num_blocks in num_blocks_by_node.items():
        print(f"{node_id}: {num_blocks} cached blocks forgotten")


async def _reset(for_connection: dict[str, Any]) -> dict[str, int]:
    async with connect(**for_connection) as client:
        done: dict[str, int] = await client.reset_prefix_caches()
    return done
