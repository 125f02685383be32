"""`tools` and `tool_choice`: tools shown to the model, and schemas of forced calls.

For a named function, the answer's schema is the function's parameters. For `required`, it is a
list of calls, `[{"name": …, "arguments": {…}}, …]`, with each tool's parameters as `arguments`.
Arguments have no names that the parameters do not name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs, parse_structured_outputs
from baton.engine.structured_output.schemas.subschemas import (
    list_subschemas,
    resolve_pointer,
    rewrite_subschemas,
)
from baton.router.doors.openai.request.bodies import ChatOptions
from baton.router.doors.openai.request.structured_outputs import (
    TOOLS,
    errors_of_field,
    output_format_from,
)
from baton.router.input_processing.limits import check_name
from baton.router.text_events.parsing import ToolCallMode, format_of_calls
from baton.router.text_events.strict_formats import STRICT_FORMATS
from baton.router.values import NO_PARSING, Parsing
from baton.rpc.errors import UnsupportedInput

Schema = dict[str, Any]

TOOL_CHOICE = "tool_choice"
ANY_ARGUMENTS: Schema = {"type": "object"}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}
# Keywords by which an object decides about names that `properties` does not have.
DECIDING = frozenset({"additionalProperties", "unevaluatedProperties"})
OF_OBJECTS = frozenset({"properties", "patternProperties", "required"})
ALTERNATIVES = ("anyOf", "oneOf")


@dataclass(slots=True)
class ClosingWork:
    """Steps through combined schemas that are left for one request, about a microsecond each.

    Further combined schemas stay open.

    A model that is forced to call a function and may add arguments of its own invents them, often
    until `max_tokens`.
    """

    num_steps_left: int = 1 << 13


def close_objects(schema: Schema, work: ClosingWork | None = None) -> Schema:
    """Return a copy with `additionalProperties: false` in each object that has `properties`.

    An object that decides about other names itself, or has no `properties`, stays as it is.
    """
    closed: Schema = rewrite_subschemas(schema, dict)
    _Closing(closed, work or ClosingWork()).close()
    return closed


class _Closing:
    """Closes the objects of one schema, in place.

    Schemas that apply to the same object together are closed as one, by all their names: closed
    alone, each would exclude the names of the others.
    """

    def __init__(self, root: Schema, work: ClosingWork) -> None:
        self._parts = list(list_subschemas(root))
        self._targets = {
            id(part): resolve_pointer(root, part["$ref"])
            for part in self._parts
            if isinstance(part.get("$ref"), str)
        }
        self._work = work

    def close(self) -> None:
        combined = [part for part in self._parts if _is_combined(part)]
        inner = set(map(id, self._reach(combined)))
        is_combined = set(map(id, combined))
        for part in self._parts:
            if id(part) in inner:
                continue
            if id(part) not in is_combined:
                _close(part, [])
            elif self._work.num_steps_left > 0:
                others = list(self._reach([part]))
                self._work.num_steps_left -= len(others) + _close(part, others)

    def _reach(self, parts: list[Schema]) -> Iterator[Schema]:
        """Yield all other schemas that can apply to the same values as one of `parts`."""
        seen: set[int] = set()
        pending = [each for part in parts for each in self._applied_by(part)]
        while pending:
            each = pending.pop()
            if isinstance(each, dict) and id(each) not in seen:
                seen.add(id(each))
                yield each
                pending += self._applied_by(each)

    def _applied_by(self, part: Schema) -> list[Any]:
        lists = (_read_list(part, name) for name in ("allOf", *ALTERNATIVES))
        return [*(each for items in lists for each in items), self._targets.get(id(part))]


def _is_combined(part: Schema) -> bool:
    """Return whether several schemas apply to the value that `part` describes."""
    num_references = sum(name in part for name in (*ALTERNATIVES, "$ref"))
    num_own = 1 if OF_OBJECTS & part.keys() else 0
    num_others = num_references + len(_read_list(part, "allOf"))
    return num_others > 0 and num_own + num_others > 1


def _close(part: Schema, others: list[Schema]) -> int:
    """Close the object and return the number of its names; 0 if it stays as it is."""
    group, own = [part, *others], part.get("properties", {})
    named = [each["properties"] for each in group if isinstance(each.get("properties"), dict)]
    decides = any(DECIDING & each.keys() for each in group)
    if decides or not named or not isinstance(own, dict):
        return 0
    names = {name for properties in named for name in properties}
    required = (name for each in group for name in _read_list(each, "required"))
    names.update(name for name in required if isinstance(name, str))
    part["properties"] = {**own, **dict.fromkeys(sorted(names - own.keys()), True)}
    part["additionalProperties"] = False
    return len(names)


def _read_list(part: Schema, name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class ToolChoice:
    tool_call_mode: ToolCallMode = ToolCallMode.NONE
    shown: Sequence[Mapping[str, Any]] = ()  # to the chat template
    name: str = ""  # of the one function
    form: StructuredOutputs | None = None


NO_TOOLS = ToolChoice()


def tool_choice_from(body: ChatOptions, parsing: Parsing = NO_PARSING) -> ToolChoice:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    choice = body.tool_choice
    if choice == "none" or (choice == "auto" and not body.tools):
        return NO_TOOLS
    if choice == "auto":
        return ToolChoice(ToolCallMode.BY_MODEL, body.tools, form=_strict_form(body, parsing))
    if choice == "required":
        functions = _functions(body.tools)
        form = _form(_schema_of_calls(functions, body))
        return ToolChoice(ToolCallMode.REQUIRED, body.tools, form=form)
    name = _name_in(choice)
    functions = _functions(body.tools)
    if name not in functions:
        raise InvalidRequest(
            f"tool_choice names {name!r}, which is not in tools: name one that is", TOOL_CHOICE
        )
    form = _form(functions[name])
    return ToolChoice(ToolCallMode.NAMED, body.tools, name, form)


def is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def _strict_form(body: ChatOptions, parsing: Parsing) -> StructuredOutputs | None:
    """Return the constraint of calls that the model decides about, None without strict tools.

    Arguments of the other tools are any objects. An output format leaves no room for calls.
    """
    name_of_format = format_of_calls(parsing)
    calls = STRICT_FORMATS.get(name_of_format)
    if calls is None or not any(map(is_strict, body.tools)):
        return None
    if output_format_from(body) is not None:
        return None
    functions, work = [], ClosingWork()
    for index, tool in enumerate(body.tools):
        name, parameters = _function(tool, f"{TOOLS}.{index}", work)
        if not calls.can_call(name):
            field = f"{TOOLS}.{index}.function.name"
            raise InvalidRequest(
                f"{field} is {name!r}, which calls of the format {name_of_format} cannot have: "
                "rename it, or leave strict out",
                field,
            )
        functions.append((name, parameters if is_strict(tool) else ANY_ARGUMENTS))
    with errors_of_field(TOOLS):
        return parse_structured_outputs({"structural_tag": calls.structural_tag(functions)})


def _name_in(choice: str | Mapping[str, Any]) -> str:
    if isinstance(choice, str):
        raise InvalidRequest(
            f"tool_choice is {choice!r}; choose none, auto, required or a function's name",
            TOOL_CHOICE,
        )
    if choice.get("type") != "function":
        raise UnsupportedInput(
            'tool_choice must be none, auto, required or {"type": "function", …}', TOOL_CHOICE
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice.function.name must be a text", TOOL_CHOICE)
    return name


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """Return parameters by function name, at least one. Raises InvalidRequest if there is none."""
    if not tools:
        raise InvalidRequest("tool_choice forces a call: send tools, or leave it out", TOOL_CHOICE)
    functions: dict[str, Schema] = {}
    work = ClosingWork()
    for index, tool in enumerate(tools):
        name, parameters = _function(tool, f"{TOOLS}.{index}", work)
        if name in functions:
            raise InvalidRequest(f"tools has two functions named {name!r}: rename one", TOOLS)
        functions[name] = parameters
    return functions


def _function(tool: Mapping[str, Any], where: str, work: ClosingWork) -> tuple[str, Schema]:
    if tool.get("type") != "function":
        raise UnsupportedInput(f"{where}.type must be function where a call is forced", where)
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.function.name must be a text", f"{where}.function.name")
    check_name(f"{where}.function.name", name)
    parameters = function.get("parameters") or NO_ARGUMENTS
    if not isinstance(parameters, dict):
        field = f"{where}.function.parameters"
        raise InvalidRequest(f"{field} must be a JSON schema", field)
    if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & parameters.keys():
        parameters = {"type": "object", **parameters}
    return name, close_objects(parameters, work)


def _schema_of_calls(functions: Mapping[str, Schema], body: ChatOptions) -> Schema:
    calls = [
        _call(name, _embed_schema(parameters, f"#/items/anyOf/{index}/properties/arguments"))
        for index, (name, parameters) in enumerate(functions.items())
    ]
    limit = {} if body.parallel_tool_calls else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit}


def _call(name: str, parameters: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _embed_schema(schema: Schema, pointer: str) -> Schema:
    """Return a copy of `schema` for embedding at `pointer`. Tools can use different JSON drafts."""

    def change(part: Schema) -> Schema:
        ref, items = part.get("$ref"), part.get("items")
        if isinstance(ref, str) and ref.startswith("#"):
            part["$ref"] = pointer + ref.removeprefix("#")
        if isinstance(items, list):  # before draft 2020-12
            part["prefixItems"] = part.pop("items")
            if "additionalItems" in part:
                part["items"] = part.pop("additionalItems")
        return part

    own = {name: value for name, value in schema.items() if name not in ("$schema", "$id")}
    embedded: Schema = rewrite_subschemas(own, change)
    return embedded


def _form(schema: Schema) -> StructuredOutputs:
    with errors_of_field(TOOLS):
        return parse_structured_outputs({"json": schema})
