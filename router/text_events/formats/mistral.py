"""Tool calls of Mistral: `[TOOL_CALLS]NAME[ARGS]{…}`, before V11 `[TOOL_CALLS][{…}, …]`. Pure."""

from __future__ import annotations

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.formats.json_calls import read_objects
from baton.router.text_events.formats.named_calls import Arguments
from baton.router.text_events.script_parser import TextBuffer, Waiting

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MAX_NAME_CHARACTERS = 256


def read_mistral_calls(source: TextBuffer, writer: CallWriter) -> Waiting[None]:
    while not source.is_at_end:
        if not (yield from source.read_to((BEGIN,), writer.text)):
            continue
        source.mark()
        if (yield from source.choose("[", "{")):
            is_whole = yield from read_objects(source, writer)
        else:
            is_whole = yield from _read_named(source, writer)
        if not is_whole:
            writer.fail_call(BEGIN, source)


def _read_named(source: TextBuffer, writer: CallWriter) -> Waiting[bool]:
    parts: list[str] = []
    found = yield from source.read_to((ARGUMENTS, CALL_ID, "{", BEGIN), parts.append)
    name = "".join(parts).strip()
    if found == CALL_ID:
        found = yield from source.read_to((ARGUMENTS,), parts.append)
    if found in (BEGIN, "{"):
        source.put_back(found)
    if not found or found == BEGIN or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        return False
    arguments = Arguments(writer, name)
    yield from arguments.read(source)
    if arguments.is_whole:
        writer.end_call()
    return arguments.is_whole
