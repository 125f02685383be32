"""Answers of Cohere's Command models: reasoning, calls and text, each between its marks. Pure."""

from __future__ import annotations

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.formats.json_calls import MarkedObjects

THINKING = "<|START_THINKING|>", "<|END_THINKING|>"
TEXT_MARKS = "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"
COMMAND = MarkedObjects(
    ("<|START_ACTION|>",),
    "<|END_ACTION|>",
    {
        THINKING[0]: CallWriter.reasoning,
        **dict.fromkeys((THINKING[1], *TEXT_MARKS), CallWriter.text),
    },
)
MARKS = (*COMMAND.begins, COMMAND.end, *COMMAND.others)
