"""The form that an answer must have, in OpenAI's words and in vLLM's, new and old. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from engine.errors import InvalidRequest
from engine.structured_outputs import StructuredOutputs, structured_outputs_of
from router.openai.bodies import GenerationBody
from serving.errors import UnsupportedInput

Form = TypeVar("Form")

RESPONSE_FORMAT = "response_format"
# vLLM's names before it had structured_outputs.
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def form_from(body: GenerationBody) -> StructuredOutputs | None:
    """None: any text. Raises InvalidRequest and UnsupportedInput, which name the field."""
    found: dict[str, StructuredOutputs] = {}
    if body.response_format is not None:
        form = _named(RESPONSE_FORMAT, _of_response_format, body.response_format)
        if form is not None:
            found[RESPONSE_FORMAT] = form
    if body.structured_outputs is not None:
        found["structured_outputs"] = structured_outputs_of(body.structured_outputs)
    for name in GUIDED:
        value = getattr(body, name)
        if value is not None:
            found[name] = _named(name, structured_outputs_of, {name.removeprefix("guided_"): value})
    if len(found) > 1:
        raise InvalidRequest(
            f"{' and '.join(found)} say twice what form the answer has: leave all but one out",
            list(found)[1],
        )
    return next(iter(found.values()), None)


def _of_response_format(given: Mapping[str, Any]) -> StructuredOutputs | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "json_schema":
            named = given.get("json_schema")
            if not isinstance(named, dict) or named.get("schema") is None:
                raise InvalidRequest(
                    f"{RESPONSE_FORMAT}.json_schema must be an object with a schema"
                )
            return structured_outputs_of({"json": named["schema"]})
        case None:
            raise InvalidRequest(f"{RESPONSE_FORMAT}.type is missing")
    raise UnsupportedInput(
        f"{RESPONSE_FORMAT}.type may be text, json_object or json_schema here", RESPONSE_FORMAT
    )


def _named(name: str, read: Callable[[Mapping[str, Any]], Form], given: Mapping[str, Any]) -> Form:
    """By the name that the client used."""
    try:
        return read(given)
    except InvalidRequest as refusal:
        raise InvalidRequest(str(refusal), name) from None
