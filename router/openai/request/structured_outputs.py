"""Structured output options of OpenAI and vLLM, including vLLM's `guided_*`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from engine.structured_output.params import StructuredOutputs, parse_structured_outputs
from errors import InvalidRequest
from router.openai.request.bodies import GenerationBody
from rpc.errors import UnsupportedInput

Form = TypeVar("Form")

RESPONSE_FORMAT = "response_format"
# vLLM's fields that `structured_outputs` replaced.
GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def output_format_from(body: GenerationBody) -> StructuredOutputs | None:
    """Return the required format, or None for any text.

    Raises InvalidRequest and UnsupportedInput, which name the field.
    """
    found: dict[str, StructuredOutputs] = {}
    if body.response_format is not None:
        form = _with_field_name(RESPONSE_FORMAT, _of_response_format, body.response_format)
        if form is not None:
            found[RESPONSE_FORMAT] = form
    if body.structured_outputs is not None:
        found["structured_outputs"] = parse_structured_outputs(body.structured_outputs)
    for name in GUIDED_FIELDS:
        value = getattr(body, name)
        if value is not None:
            found[name] = _with_field_name(
                name, parse_structured_outputs, {name.removeprefix("guided_"): value}
            )
    if len(found) > 1:
        raise InvalidRequest(
            f"{' and '.join(found)} each set the output format: leave all but one out",
            list(found)[1],
        )
    return next(iter(found.values()), None)


def _of_response_format(option: Mapping[str, Any]) -> StructuredOutputs | None:
    match option.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema":
            named = option.get("json_schema")
            if not isinstance(named, dict) or named.get("schema") is None:
                raise InvalidRequest(
                    f"{RESPONSE_FORMAT}.json_schema must be an object with a schema"
                )
            return parse_structured_outputs({"json": named["schema"]})
        case None:
            raise InvalidRequest(f"{RESPONSE_FORMAT}.type is missing")
    raise UnsupportedInput(
        f"{RESPONSE_FORMAT}.type must be text, json_object or json_schema", RESPONSE_FORMAT
    )


def _with_field_name(
    name: str, read: Callable[[Mapping[str, Any]], Form], option: Mapping[str, Any]
) -> Form:
    """Read an option, with errors that name the client's field."""
    try:
        return read(option)
    except InvalidRequest as refusal:
        raise InvalidRequest(str(refusal), name) from None
