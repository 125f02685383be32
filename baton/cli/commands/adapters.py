"""`baton adapters`: list, load and unload the LoRA adapters of a running cluster."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.command import CommandGroup
from baton.cli.examples import examples
from baton.cli.options.connection import (
    OperatorTokenFile,
    call_router,
    connect,
    operator_token,
)
from baton.cli.show import console, table_of
from baton.cli.signatures import inherit_options
from baton.core.options import MODEL, OUTPUT, Option
from baton.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from baton.client import AsyncClient
    from baton.client.node_status import AdapterStatus

MAX_ID_CHARACTERS = 12
TO_THE_RIGHT = {"in memory", "size"}

adapters = typer.Typer(
    cls=CommandGroup, help="List, load and unload LoRA adapters.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(help="Name of the adapter, which requests send as model.")]


@adapters.command(name="list", epilog=examples("baton adapters list"))
@inherit_options(connect)
def list_adapters(
    as_json: Annotated[bool, Option("Print a JSON array.", OUTPUT, flags=("--json",))] = False,
    **given: Any,
) -> None:
    """List the adapters that nodes have, in memory or on disk."""
    found = call_router(given, _adapters)
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
    elif found:
        console().print(table_of_adapters(found))
    else:
        print("no node has an adapter; load one: baton adapters load NAME FOLDER")


@adapters.command(
    epilog=examples(
        "baton adapters load sql tenants/sql", "baton adapters load sql tenants/sql-2 --replace"
    )
)
@inherit_options(connect)
def load(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(
            help="Folder as PEFT saves it, relative to the --lora-root of the nodes; the same on "
            "each of them."
        ),
    ],
    model: Annotated[
        str,
        Option("Model that it adapts. Default: the only one whose nodes serve adapters.", MODEL),
    ] = "",
    replace: Annotated[
        bool,
        Option("Replace the adapter that has this name.", MODEL, flags=("--replace",)),
    ] = False,
    operator_token_file: OperatorTokenFile = None,
    **given: Any,
) -> None:
    """Load an adapter on all nodes of its model, or on none if a node refuses it."""
    token = operator_token(operator_token_file)
    adapter, num_nodes = call_router(
        given,
        lambda client: client.load_adapter(
            name, path, model=model, can_replace=replace, operator_token=token
        ),
    )
    where, short_id = format_count(num_nodes, "node"), adapter.id[:MAX_ID_CHARACTERS]
    print(f"{name}: loaded on {where}, id {short_id}")


@adapters.command(epilog=examples("baton adapters unload sql"))
@inherit_options(connect)
def unload(
    name: Name,
    operator_token_file: OperatorTokenFile = None,
    **given: Any,
) -> None:
    """Unload an adapter from all nodes; requests in progress keep it."""
    token = operator_token(operator_token_file)
    num_nodes = call_router(given, lambda client: client.unload_adapter(name, token))
    print(f"{name}: unloaded from {format_count(num_nodes, 'node')}")


async def _adapters(client: AsyncClient) -> list[AdapterStatus]:
    from baton.client.node_status import adapters_of

    async with aclosing(client.nodes()) as updates:
        async for statuses in updates:
            return adapters_of(statuses)
    return []


def table_of_adapters(found: list[AdapterStatus]) -> Table:
    title = format_count(len(found), "adapter")
    return table_of(title, [_row(each) for each in found], TO_THE_RIGHT)


def _row(status: AdapterStatus) -> dict[str, str]:
    return {
        "adapter": status.adapter.name,
        "model": status.model,
        "folder": status.adapter.path,
        "id": status.adapter.id[:MAX_ID_CHARACTERS],
        "in memory": f"{status.num_in_memory} of {format_count(status.num_nodes, 'node')}",
        "size": format_bytes(status.num_bytes) if status.num_in_memory else "",
    }
