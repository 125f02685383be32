"""`baton embed`: vectors of texts, one JSON array per line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.options.connection import call_router, connect
from baton.cli.signatures import inherit_options
from baton.core.errors import InvalidRequest
from baton.core.options import MODEL, Option

if TYPE_CHECKING:
    from baton.client import AsyncClient


@inherit_options(connect)
def embed(
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts to embed. Default: lines of standard input.")
    ] = None,
    model: Annotated[
        str, Option("Model to embed with. Default: the only one that embeds.", MODEL)
    ] = "",
    dimensions: Annotated[
        int | None, Option("Keep the first N numbers of each embedding.", MODEL, at_least=1)
    ] = None,
    truncate: Annotated[
        int | None,
        Option("Use at most N tokens of each text; longer ones are refused otherwise.", at_least=1),
    ] = None,
    per_token: Annotated[
        bool, Option("Print a list of vectors for each text, one for each of its tokens.", MODEL)
    ] = False,
    **given: Any,
) -> None:
    """Embed texts on a running cluster, or score them if its model is a classifier."""

    async def embedded(client: AsyncClient) -> list[Any]:
        embed = client.embed_tokens if per_token else client.embed
        found: list[Any] = await embed(
            _texts(texts), model=model, dimensions=dimensions, truncate_prompt_tokens=truncate
        )
        return [matrix.tolist() for matrix in found] if per_token else found

    for vector in call_router(given, embedded):
        print(json.dumps(vector))


def _texts(arguments: list[str] | None) -> list[str]:
    """Raises InvalidRequest."""
    if arguments:
        return arguments
    if sys.stdin.isatty():
        raise InvalidRequest("no text: pass texts as arguments, or pipe in one per line")
    return sys.stdin.read().splitlines()
