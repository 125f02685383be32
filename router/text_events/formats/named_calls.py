"""Tool calls with a name before JSON arguments: DeepSeek until V3.1, Kimi K2, Mistral. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.formats.json_calls import parse_object, read_objects
from baton.router.text_events.scanning import JsonScan
from baton.router.text_events.script_parser import TextBuffer, Waiting

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Calls of the form: begin mark, name, separator, JSON arguments, end mark."""

    begin: str
    separators: tuple[str, ...]  # between name and arguments
    ends: tuple[str, ...]  # after the arguments; the first call can lack one
    section: tuple[str, str] | None = None  # marks around all calls
    name: Callable[[str], str] = str.strip  # from the text between the marks

    def __call__(self, source: TextBuffer, writer: CallWriter) -> Waiting[None]:
        opening = self.begin if self.section is None else self.section[0]
        while not source.is_at_end:
            found = yield from source.read_to((opening,), writer.text)
            if found:
                source.mark()
                is_whole = yield from self._calls(source, writer)
                if not is_whole:
                    writer.fail_call(found, source)

    def _calls(self, source: TextBuffer, writer: CallWriter) -> Waiting[bool]:
        """Read the calls of a section, and drop what is between them."""
        if self.section is None:
            return (yield from self._call(source, writer))
        dropped: list[str] = []
        has_call = False
        while True:
            found = yield from source.read_to((self.begin, self.section[1]), dropped.append)
            if found != self.begin:
                return bool(found) and (has_call or not "".join(dropped).strip())
            if not (yield from self._call(source, writer)):
                return False
            has_call = True
            source.mark()

    def _call(self, source: TextBuffer, writer: CallWriter) -> Waiting[bool]:
        """Read a call after its begin mark. Returns whether it is whole."""
        name = yield from source.read_until(*self.separators)
        if name is None:
            return False
        arguments = Arguments(writer, self.name(name))
        yield from arguments.read(source)
        if not arguments.is_whole:
            return False
        ending = yield from source.accept(*self.ends) if self.ends else _nothing()
        if self.ends and not ending:
            return False
        writer.end_call()
        return True


def _nothing() -> Waiting[str]:
    yield from ()
    return ""


class Arguments:
    """JSON arguments of one call, written as they arrive."""

    def __init__(self, writer: CallWriter, name: str) -> None:
        self._writer, self._name = writer, name
        self._parts: list[str] = []
        self.is_whole = False

    def read(self, source: TextBuffer) -> Waiting[None]:
        if not (yield from source.choose("{")):
            return
        source.skip_space()
        self._writer.begin_call(self._name)
        scan = JsonScan()
        while True:
            end = scan.scan(source.buffer)
            text = source.take(len(source.buffer) if end is None else end)
            self._parts.append(text)
            self._writer.arguments(text)
            if end is not None:
                self.is_whole = parse_object("".join(self._parts)) is not None
                return
            if not (yield from source.more()):
                return


def read_mistral_calls(source: TextBuffer, writer: CallWriter) -> Waiting[None]:
    """Tool calls of Mistral: `[TOOL_CALLS]NAME[ARGS]{…}`, before V11 `[TOOL_CALLS][{…}, …]`."""
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
