"""Options of KV connectors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from baton.cli.options.kv_cache import KV_PANEL
from baton.core.errors import InvalidConfig

KvConnectorName = Annotated[
    str,
    typer.Option(
        help="Installed KV connector: a KV cache outside the node, from which prompts with the "
        "same prefix are loaded. Default: none, or the built-in tiers with --kv-host-memory.",
        rich_help_panel=KV_PANEL,
    ),
]
KvConnectorSettings = Annotated[
    str,
    typer.Option(help="Settings of --kv-connector, as a JSON object.", rich_help_panel=KV_PANEL),
]


def parse_connector_config(written: str) -> dict[str, object]:
    """Parse a JSON object; empty for an empty text. Raises InvalidConfig."""
    try:
        config = json.loads(written or "{}")
    except ValueError as error:
        raise InvalidConfig(f"--kv-connector-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidConfig(f"--kv-connector-config {written}: it must be a JSON object")
    return config
