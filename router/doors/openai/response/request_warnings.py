"""`warnings` of an answer: requested features that were not applied. Pure.

A whole answer has them next to `usage`, a stream in the last chunk of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.doors.openai.request.parsed_request import ResponseOptions
from baton.router.http.json_encoding import Json
from baton.router.text_events.parsing import Parsing, ToolCallMode
from baton.router.values import CompletionSummary


class Warnings:
    """Warnings of one request."""

    def __init__(self, options: ResponseOptions, parsing: Parsing, *, supports_tools: bool) -> None:
        self._of_tools = _of_tools(options, parsing, supports_tools=supports_tools)

    def of(self, *endings: CompletionSummary) -> Json:
        """Return the field `warnings`, or no field if there are none."""
        unfulfilled = (warning for each in endings for warning in each.warnings)
        warnings = [*self._of_tools, *dict.fromkeys(unfulfilled)]
        return {"warnings": warnings} if warnings else {}


def _of_tools(options: ResponseOptions, parsing: Parsing, *, supports_tools: bool) -> Sequence[str]:
    if options.tool_call_mode is ToolCallMode.NONE:
        return ()
    warnings = []
    if not supports_tools:
        warnings.append("tools: this model's chat template does not show them to the model")
    if options.tool_call_mode is ToolCallMode.BY_MODEL:
        if options.form_field:
            warnings.append(
                "tools: structured output contains no calls unless tool_choice forces one"
            )
        elif not parsing.tools:
            warnings.append("tools: without --tool-parser, tool calls stay in the content")
    return warnings
