"""Options for hints about the KV of a request."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.core.kv_hints import KvHints

HINTS_PANEL = "KV hints"

SessionId = Annotated[
    str,
    typer.Option(
        help="Id of the conversation: its KV is stored in files at once.",
        rich_help_panel=HINTS_PANEL,
    ),
]
RetainS = Annotated[
    float,
    typer.Option(
        help="Seconds for which tiers below the KV cache keep the KV of prompt and answer.",
        rich_help_panel=HINTS_PANEL,
    ),
]
KvPriority = Annotated[
    int | None,
    typer.Option(
        help="Priority of the KV in tiers, 0 to 100: lower ones are evicted first. Default: 35.",
        rich_help_panel=HINTS_PANEL,
    ),
]
Release = Annotated[
    bool,
    typer.Option(
        "--release", help="Evict the KV first after the request.", rich_help_panel=HINTS_PANEL
    ),
]
Prefetch = Annotated[
    bool,
    typer.Option(
        "--prefetch",
        help="Load the KV of the prompt into the KV cache, and generate nothing.",
        rich_help_panel=HINTS_PANEL,
    ),
]


def kv_hints(
    session_id: SessionId = "",
    retain_s: RetainS = 0.0,
    kv_priority: KvPriority = None,
    release: Release = False,
    prefetch: Prefetch = False,
) -> KvHints:
    """Raises InvalidRequest."""
    return KvHints(session_id, retain_s, kv_priority, release=release, prefetch=prefetch)
