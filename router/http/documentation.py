"""Routes of the OpenAPI document and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from baton.router.http.openapi import (
    DOCUMENT,
    PAGE,
    Described,
    openapi_document,
    openapi_page,
)


def documentation(
    routes: Sequence[BaseRoute], described: Mapping[str, Described], *, has_tokens: bool
) -> list[Route]:
    """Return routes that document `routes`. OpenAPI describes HTTP alone, without WebSocket."""
    over_http = [route for route in routes if isinstance(route, Route)]
    document = openapi_document(over_http, described, has_tokens=has_tokens)

    async def show_document(_request: Request) -> Response:
        return JSONResponse(document)

    async def show_page(_request: Request) -> Response:
        return HTMLResponse(openapi_page(document))

    return [Route(DOCUMENT, show_document), Route(PAGE, show_page)]
