"""`baton reset-prefix-cache`: clear the prefix caches of a cluster's nodes."""

from __future__ import annotations

from typing import Any

from baton.cli.options.connection import connect
from baton.cli.signatures import inherit_options


@inherit_options(connect)
def reset_prefix_cache(**given: Any) -> None:
    """Clear the prefix cache of every node; running requests are not affected."""
    import asyncio

    num_blocks_by_node = asyncio.run(_reset(given))
    for node_id, num_blocks in num_blocks_by_node.items():
        print(f"{node_id}: {num_blocks} cached blocks dropped")


async def _reset(for_connection: dict[str, Any]) -> dict[str, int]:
    async with connect(**for_connection) as client:
        num_blocks: dict[str, int] = await client.reset_prefix_caches()
    return num_blocks
