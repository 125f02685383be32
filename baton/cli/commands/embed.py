"""`baton embed`: vectors of texts, one JSON array per line."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from baton.cli.options.connection import connect
from baton.cli.signatures import inherit_options, make
from baton.core.errors import InvalidRequest
from baton.core.options import MODEL, Option


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
    from baton.cli.event_loop import run_interruptibly

    async def run() -> list[Any]:
        async with make(connect, given) as client:
            embed = client.embed_tokens if per_token else client.embed
            found = await embed(
                _texts(texts), model=model, dimensions=dimensions, truncate_prompt_tokens=truncate
            )
            return [matrix.tolist() for matrix in found] if per_token else found

    for vector in run_interruptibly(run()):
        print(json.dumps(vector))


def _texts(arguments: list[str] | None) -> list[str]:
    """Raises InvalidRequest."""
    if arguments:
        return arguments
    if sys.stdin.isatty():
        raise InvalidRequest("no text: pass texts as arguments, or pipe in one per line")
    return sys.stdin.read().splitlines()
