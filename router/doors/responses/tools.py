"""Tools of Responses as functions of a chat. Pure.

A namespace groups functions. The model sees each under one name, and a call of it is returned under
its two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.core.errors import InvalidRequest
from baton.router.doors.openai.request.bodies import Body, Tools, validate_body

MAX_SHOWN_CHARACTERS = 200
SEPARATOR = "__"
Name = Annotated[str, Field(min_length=1)]


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # Accepted where they match the behaviour, or do not affect it.
    defer_loading: bool | None = None  # shown from the beginning
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: Any = None


class NamespaceTool(Body):
    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Tools


@dataclass(slots=True)
class ShownTools:
    """Functions that the model sees."""

    functions: list[dict[str, Any]] = field(default_factory=list)  # as tools of a chat
    # Namespace and name of a function by the name that the model sees.
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a function."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith(SEPARATOR) else SEPARATOR}{name}"


def read_tools(tools: Sequence[Mapping[str, Any]]) -> ShownTools:
    """Read the tools. Other kinds cannot be called and are left out, with a warning."""
    shown, others = ShownTools(), list[str]()
    for where, namespace, tool in _flatten(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and kind != "function":
            others.append(kind)
            continue
        function = validate_body(tool, FunctionTool, where)
        name = joined_name(namespace, function.name)
        if namespace is not None:
            if name in shown.namespaces:
                raise InvalidRequest(f"tools has two functions named {name!r}: rename one", where)
            shown.namespaces[name] = (namespace, function.name)
        shown.functions.append(_of_chat(function, name))
    if others:
        kinds = ", ".join(dict.fromkeys(others))
        limit = MAX_SHOWN_CHARACTERS
        listed = kinds if len(kinds) <= limit else f"{kinds[:limit]}…"
        shown.warnings = [f"tools: only functions are shown to the model, not {listed}"]
    return shown


def _flatten(
    tools: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Return field, namespace and body of each tool."""
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.get("type") != "namespace":
            yield where, None, tool
            continue
        namespace = validate_body(tool, NamespaceTool, where)
        for number, inner in enumerate(namespace.tools):
            yield f"{where}.tools.{number}", namespace.name, inner


def _of_chat(function: FunctionTool, name: str) -> dict[str, Any]:
    optional = {
        "description": function.description,
        "parameters": function.parameters,
        "strict": function.strict,
    }
    given = {key: value for key, value in optional.items() if value is not None}
    return {"type": "function", "function": {"name": name, **given}}
