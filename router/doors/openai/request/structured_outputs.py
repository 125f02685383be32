"""Structured output options of OpenAI and vLLM, including vLLM's `guided_*`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import FIELD, StructuredOutputs, parse_structured_outputs
from baton.router.doors.openai.request.bodies import GenerationBody
from baton.rpc.errors import UnsupportedInput

RESPONSE_FORMAT = "response_format"
# vLLM's fields that `structured_outputs` replaced.
GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
TOOLS = "tools"
# Beginning of an error about a constraint, however the client sent it.
_SUBJECT = re.compile(rf"{FIELD}(\.\w+)?\b")


class OutputFormat(NamedTuple):
    field: str  # the field of the request that set it
    form: StructuredOutputs


@contextmanager
def errors_of_field(field: str) -> Iterator[None]:
    """Rewrite errors about a constraint to name the field that the client sent."""
    try:
        yield
    except InvalidRequest as refusal:
        reason = str(refusal)
        if field in ("", FIELD) or not _SUBJECT.match(reason):
            raise
        subject = "the form made of the tools' parameters" if field == TOOLS else field
        raise InvalidRequest(_SUBJECT.sub(subject, reason, count=1), field) from None


def output_format_from(body: GenerationBody) -> OutputFormat | None:
    """Return the required format, or None for any text.

    Raises InvalidRequest and UnsupportedInput, which name the field.
    """
    found: dict[str, StructuredOutputs] = {}
    if body.response_format is not None:
        with errors_of_field(RESPONSE_FORMAT):
            form = _of_response_format(body.response_format)
        if form is not None:
            found[RESPONSE_FORMAT] = form
    if body.structured_outputs is not None:
        found[FIELD] = parse_structured_outputs(body.structured_outputs)
    for name in GUIDED_FIELDS:
        value = getattr(body, name)
        if value is not None:
            with errors_of_field(name):
                found[name] = parse_structured_outputs({name.removeprefix("guided_"): value})
    if len(found) > 1:
        raise InvalidRequest(
            f"{' and '.join(found)} each set the output format: leave all but one out",
            list(found)[1],
        )
    return next((OutputFormat(*each) for each in found.items()), None)


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
                    f"{RESPONSE_FORMAT}.json_schema must be an object with a schema",
                    RESPONSE_FORMAT,
                )
            return parse_structured_outputs({"json": named["schema"]})
        case None:
            raise InvalidRequest(f"{RESPONSE_FORMAT}.type is missing", RESPONSE_FORMAT)
    raise UnsupportedInput(
        f"{RESPONSE_FORMAT}.type must be text, json_object or json_schema", RESPONSE_FORMAT
    )
