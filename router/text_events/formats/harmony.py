"""Messages of gpt-oss (Harmony): reasoning, text and calls on channels. Pure.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`. A call is a
message `to=functions.NAME`, whose text is its JSON arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.formats.named_calls import Arguments
from baton.router.text_events.script_parser import TextBuffer, Waiting

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, "<|constrain|>")
ENDS = (END, CALL, RETURN)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."


def read_harmony(source: TextBuffer, writer: CallWriter) -> Waiting[None]:
    """Read messages. The first one's header began in the prompt."""
    while not source.is_at_end:
        source.mark()
        parts: list[str] = []
        found = yield from source.read_to((MESSAGE, *ENDS), parts.append)
        header = "".join(parts)
        if found == MESSAGE:
            yield from _read_message(source, writer, header)
        elif not found and not any(text in header for text in (CHANNEL, START, "to=")):
            writer.text(header)  # of a model that does not write Harmony


def _read_message(source: TextBuffer, writer: CallWriter, header: str) -> Waiting[None]:
    recipient = _RECIPIENT.search(header)
    channels = _CHANNEL.findall(header)
    if recipient is not None and recipient[1].startswith(FUNCTIONS):
        yield from _read_call(source, writer, recipient[1].removeprefix(FUNCTIONS))
    elif recipient is not None and recipient[1] != "assistant":
        yield from source.read_to(ENDS, _ignore)  # of a tool that runs elsewhere
    elif channels[-1:] == ["analysis"]:
        yield from _read_text(source, writer.reasoning)
    else:
        yield from _read_text(source, writer.text)


def _read_text(source: TextBuffer, add: Callable[[str], None]) -> Waiting[None]:
    """Read a text to its end mark. Other marks in it are part of it."""
    while True:
        found = yield from source.read_to(ENDS, add)
        if not found or found == RETURN:
            return
        if (yield from source.choose(START)) or source.is_at_end:
            return
        add(found)


def _read_call(source: TextBuffer, writer: CallWriter, name: str) -> Waiting[None]:
    arguments = Arguments(writer, name)
    source.mark()
    yield from arguments.read(source)
    if arguments.is_whole:
        writer.end_call()
        yield from source.read_to(ENDS, _ignore)
        return
    yield from source.read_to(ENDS, _ignore)
    writer.fail_call("", source)


def _ignore(_text: str) -> None:
    """Leave text out."""
