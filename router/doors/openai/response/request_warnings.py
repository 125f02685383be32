"""`warnings` of an answer: requested features that were not applied. Pure.

A whole answer has them next to `usage`, a stream in the last chunk of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.finish import Finish
from baton.router.doors.openai.request.parsed_request import ResponseOptions
from baton.router.http.json_encoding import Json
from baton.router.text_events.parsing import TextFormat, ToolCallMode


class Warnings:
    """Warnings of one request."""

    def __init__(self, options: ResponseOptions, *, supports_tools: bool) -> None:
        self._of_tools = _of_tools(options.text_format, supports_tools=supports_tools)

    def field(self, *ends: Finish) -> Json:
        """Return the field `warnings`, or no field if there are none."""
        unfulfilled = (warning for each in ends for warning in each.warnings)
        warnings = [*self._of_tools, *dict.fromkeys(unfulfilled)]
        return {"warnings": warnings} if warnings else {}


def _of_tools(text_format: TextFormat, *, supports_tools: bool) -> Sequence[str]:
    if text_format.tool_calls is ToolCallMode.NONE:
        return ()
    warnings = []
    if not supports_tools:
        warnings.append("tools: this model's chat template does not show them to the model")
    if text_format.tool_calls is ToolCallMode.BY_MODEL:
        if text_format.is_constrained:
            warnings.append(
                "tools: structured output contains no calls unless tool_choice forces one"
            )
        elif not text_format.parsing.tools:
            warnings.append("tools: without --tool-parser, tool calls stay in the content")
    return warnings
