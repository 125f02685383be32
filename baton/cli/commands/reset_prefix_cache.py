"""`baton reset-prefix-cache`: clear the prefix caches of a cluster's nodes."""

from __future__ import annotations

from typing import Annotated, Any

from baton.cli.options.connection import (
    OperatorTokenFile,
    call_router,
    connect,
    operator_token,
)
from baton.cli.signatures import inherit_options
from baton.core.options import Option
from baton.kv_transfer.external_kv import TIERS

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
    reset_running: Annotated[
        bool,
        Option(
            "Preempt running requests, which compute their KV again; hand-offs in flight keep it.",
            flags=("--reset-running",),
        ),
    ] = False,
    operator_token_file: OperatorTokenFile = None,
    **given: Any,
) -> None:
    """Clear the prefix cache of every node."""
    chosen = [] if not tiers or ALL in tiers else tiers
    token = operator_token(operator_token_file)
    dropped = call_router(
        given,
        lambda client: client.reset_prefix_caches(chosen, token, reset_running=reset_running),
    )
    for node_id, num_blocks in dropped.items():
        counts = ", ".join(f"{num_blocks[tier]} {tier}" for tier in TIERS if tier in num_blocks)
        print(f"{node_id}: {counts or 'no'} blocks dropped")
