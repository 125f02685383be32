"""OpenAPI document of the HTTP APIs, and a page that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from baton.router.http.json_encoding import Json

DOCUMENT, PAGE = "/openapi.json", "/docs"
REFERENCE = "#/components/schemas/{model}"
STYLE = "body{font:15px/1.5 sans-serif;max-width:52em;margin:2em auto}code{font-size:14px}"


@dataclass(frozen=True, slots=True)
class Described:
    """Description of a path. A body that has several forms has several models."""

    summary: str
    bodies: Sequence[type[BaseModel]] = ()


def documentation(
    routes: Sequence[BaseRoute], described: Mapping[str, Described], *, has_tokens: bool
) -> list[Route]:
    """Return routes that document `routes`. OpenAPI describes HTTP alone, without WebSocket."""
    over_http = [route for route in routes if isinstance(route, Route)]
    document = _LateDocument(partial(_document, over_http, described, has_tokens=has_tokens))

    async def show_document(_request: Request) -> Response:
        return JSONResponse(await document.get())

    async def show_page(_request: Request) -> Response:
        return HTMLResponse(_page(await document.get()))

    return [Route(DOCUMENT, show_document), Route(PAGE, show_page)]


class _LateDocument:
    """Document that is made on a thread when it is first requested.

    Its schemas take a hundred milliseconds, most of a router's start.
    """

    def __init__(self, make: Callable[[], Json]) -> None:
        self._make = make
        self._making: asyncio.Task[Json] | None = None

    async def get(self) -> Json:
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(self._make))
        return await asyncio.shield(self._making)  # it goes on if the client disconnects


def _document(
    routes: Sequence[Route], described: Mapping[str, Described], *, has_tokens: bool
) -> Json:
    """Return the document. Paths without a description are listed by their methods alone."""
    models = sorted({body for one in described.values() for body in one.bodies}, key=_name)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template=REFERENCE
    )
    paths: Json = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        operation = _operation(path, described.get(path, Described("")))
        methods = sorted((route.methods or {"GET"}) - {"HEAD"})
        paths.setdefault(path, {}).update({method.lower(): operation for method in methods})
    components: Json = {"schemas": schemas.get("$defs", {})}
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version("baton")},
        "paths": paths,
        "components": components,
    }
    if has_tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _page(document: Json) -> str:
    """Return an HTML page, without scripts, that lists paths and the fields of bodies."""
    parts = ["<!doctype html><meta charset=utf-8><title>Baton</title>", f"<style>{STYLE}</style>"]
    parts.append(f'<h1>Baton</h1><p>As JSON: <a href="{DOCUMENT}">{DOCUMENT}</a></p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h3><code>{method.upper()} {escape(path)}</code></h3>")
            parts.append(f"<p>{escape(operation['summary'])}</p>")
            names = _body_names(operation)
            links = (f'<a href="#{name}">{name}</a>' for name in names)
            if names:
                parts.append(f"<p>Body: {' or '.join(links)}</p>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3><ul>')
        needed = schema.get("required", ())
        for field in schema.get("properties", {}):
            note = ", required" if field in needed else ""
            parts.append(f"<li><code>{escape(field)}</code>{note}</li>")
        parts.append("</ul>")
    return "\n".join(parts)


def _name(model: type[BaseModel]) -> str:
    return model.__name__


def _operation(path: str, described: Described) -> Json:
    operation: Json = {"summary": described.summary, "responses": {"200": {"description": "done"}}}
    refs = [{"$ref": REFERENCE.format(model=_name(body))} for body in described.bodies]
    if refs:
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    parameters = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    return operation


def _body_names(operation: Mapping[str, Any]) -> list[str]:
    if "requestBody" not in operation:
        return []
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return [ref["$ref"].rpartition("/")[2] for ref in schema.get("anyOf", [schema])]
