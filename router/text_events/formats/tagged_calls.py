"""Tool calls whose arguments a model writes between tags, as plain text. Pure.

Qwen 3 Coder, GLM 4.5, DeepSeek from V3.2 on, Kimi K3, MiniMax M2. Text becomes JSON by the types of
the tool's schema.
"""

from __future__ import annotations

import html
import json
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.formats.argument_types import ArgumentTypes, typed_json
from baton.router.text_events.script_parser import TextBuffer, Waiting

STRING = frozenset({"string"})
ANY_JSON = frozenset({"any"})  # as it is written


class Parameter(NamedTuple):
    name: str
    types: frozenset[str] | None = None  # None: by the tool's schema


def _parameter(text: str) -> Parameter:
    return Parameter(text.strip())


@dataclass(frozen=True, slots=True)
class CallTags:
    """Tags of a format. Whitespace between them has no meaning."""

    begin: str  # of a call; its name follows
    name_ends: tuple[str, ...]
    parameter: str  # begin of a parameter; its name follows
    parameter_ends: tuple[str, ...]
    # Ends of a value, with the texts that may follow; before others, a tag is part of the text.
    # An empty text is the end of an answer that the model ended.
    value_ends: Mapping[str, tuple[str, ...]]
    end: str  # of a call
    value: str = ""  # begin of a value; empty: it follows the name
    section: tuple[str, str] | None = None  # around calls; models leave the first one out, too
    outside: tuple[str, ...] = ()  # tags without meaning between texts and calls
    read_name: Callable[[str], str] = str.strip
    read_parameter: Callable[[str], Parameter] = _parameter
    strips_newline: bool = False  # at the beginning of a value
    self_closing: str = ""  # end of a name without parameters and end tag

    @property
    def marks(self) -> tuple[str, ...]:
        """Tags that can be special tokens."""
        tags = (*(self.section or ()), self.begin, *self.name_ends, self.parameter)
        return (*tags, *self.parameter_ends, self.value, self.end, *self.value_ends, *self.outside)


class TaggedCalls:
    """Script of a format with tags."""

    def __init__(self, tags: CallTags, types: ArgumentTypes) -> None:
        self._tags, self._types = tags, types

    def __call__(self, source: TextBuffer, writer: CallWriter) -> Waiting[None]:
        tags = self._tags
        openings = (tags.begin,) if tags.section is None else (tags.section[0], tags.begin)
        while not source.is_at_end:
            found = yield from source.read_to((*openings, *tags.outside), writer.text)
            if found not in openings:
                continue
            source.mark()
            if found == tags.begin:
                is_whole = yield from self._call(source, writer)
            else:
                is_whole = bool((yield from source.accept(tags.begin)))
                is_whole = is_whole and (yield from self._call(source, writer))
            if is_whole:
                yield from self._others(source, writer)
            else:
                writer.fail_call(found, source)

    def _others(self, source: TextBuffer, writer: CallWriter) -> Waiting[None]:
        """Read the other calls of a section, and its end."""
        tags = self._tags
        while tags.section is not None:
            source.mark()
            found = yield from source.accept(tags.begin, tags.section[1])
            if found != tags.begin:
                return
            if not (yield from self._call(source, writer)):
                writer.fail_call("", source)
                return

    def _call(self, source: TextBuffer, writer: CallWriter) -> Waiting[bool]:
        tags = self._tags
        parts: list[str] = []
        ended = yield from source.read_to(tags.name_ends, parts.append)
        tag = "".join(parts)
        name = tags.read_name(tag) if ended and len(tag) <= MAX_TAG_CHARACTERS else ""
        if not name or len(name) > MAX_NAME_CHARACTERS:
            return False
        if ended in (tags.parameter, tags.end):
            source.put_back(ended)
        writer.begin_call(name)
        opening = "{"
        while ended != tags.self_closing and (yield from source.accept(tags.parameter)):
            if not (yield from self._parameter(source, writer, name, opening)):
                return False
            opening = ", "
        if ended != tags.self_closing and not (yield from source.accept(tags.end)):
            return False
        writer.arguments("}" if opening == ", " else "{}")
        writer.end_call()
        return True

    def _parameter(
        self, source: TextBuffer, writer: CallWriter, function: str, opening: str
    ) -> Waiting[bool]:
        tags = self._tags
        text = yield from source.read_until(*tags.parameter_ends)
        if text is None or len(text) > MAX_TAG_CHARACTERS:
            return False
        if tags.value and not (yield from source.accept(tags.value)):
            return False
        name, types = tags.read_parameter(text)
        writer.arguments(f"{opening}{json.dumps(name, ensure_ascii=False)}: ")
        return (yield from self._value(source, writer, types or self._types.of(function, name)))

    def _value(
        self, source: TextBuffer, writer: CallWriter, types: frozenset[str]
    ) -> Waiting[bool]:
        """Read a value and its end. Text is written as it arrives, others at their end."""
        tags = self._tags
        parts: list[str] = []
        is_text = types == STRING

        def add(text: str) -> None:
            if is_text:
                writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                parts.append(text)

        if is_text:
            writer.arguments('"')
        if tags.strips_newline and (yield from source.choose("\n", skips_space=False)):
            source.take(1)
        while True:
            ended = yield from source.read_to(tuple(tags.value_ends), add)
            if not ended:
                return False
            follows = tags.value_ends[ended]
            found = yield from source.choose(*filter(None, follows))
            is_last = source.is_closed and not source.is_cut_off and not source.buffer.strip()
            if found or ("" in follows and is_last):
                break
            add(ended)
        if ended.strip() in (tags.parameter, tags.end):
            source.put_back(ended)
        writer.arguments('"' if is_text else typed_json("".join(parts), types))
        return True


MAX_NAME_CHARACTERS = 256
MAX_TAG_CHARACTERS = 1 << 12  # with attributes; Python reads no reference of 4,300 digits, &#…;
# A name begins after another character: tried at each of its own, it would take quadratic time.
_ATTRIBUTE = re.compile(r'(?<![\w-])([\w-]+)="([^"]*)"')
# Models leave out end tags: the tags after them, on a line of their own, end the value, too.
QWEN = CallTags(
    section=("<tool_call>", "</tool_call>"),
    begin="<function=",
    name_ends=(">",),
    parameter="<parameter=",
    parameter_ends=(">",),
    value_ends={
        "\n</parameter>": ("<parameter=", "</function>"),
        "</parameter>": ("<parameter=", "</function>"),
        "\n<parameter=": tuple(string.ascii_letters + "_"),
        "\n</function>": ("</tool_call>",),
    },
    end="</function>",
    strips_newline=True,
)
GLM = CallTags(
    begin="<tool_call>",
    name_ends=("<arg_key>", "</tool_call>"),
    parameter="<arg_key>",
    parameter_ends=("</arg_key>",),
    value="<arg_value>",
    value_ends={"</arg_value>": ("<arg_key>", "</tool_call>"), "</tool_call>": ("<tool_call>", "")},
    end="</tool_call>",
)


def dsml_tags(section: str, space: str = "") -> CallTags:
    """Return the tags of DeepSeek's markup. A parameter has the attribute `string`."""
    return _invoke_tags(f"<｜DSML｜{space}", f"</｜DSML｜{space}", section, _dsml_parameter)


def _invoke_tags(
    begin: str, end: str, section: str, read_parameter: Callable[[str], Parameter]
) -> CallTags:
    """Return the tags `invoke` and `parameter`, whose names are attributes, within a section."""
    return CallTags(
        section=(f"{begin}{section}>", f"{end}{section}>"),
        begin=f"{begin}invoke",
        name_ends=("/>", ">"),
        parameter=f"{begin}parameter",
        parameter_ends=(">",),
        value_ends={f"{end}parameter>": (f"{begin}parameter", f"{end}invoke>")},
        end=f"{end}invoke>",
        read_name=lambda text: _attributes(text).get("name", ""),
        read_parameter=read_parameter,
        self_closing="/>",
    )


def _dsml_parameter(text: str) -> Parameter:
    attributes = _attributes(text)
    is_text = attributes.get("string", "true") == "true"
    return Parameter(attributes.get("name", ""), STRING if is_text else ANY_JSON)


def _kimi_parameter(text: str) -> Parameter:
    attributes = _attributes(text)
    is_text = attributes.get("type", "string") == "string"
    return Parameter(attributes.get("key", ""), STRING if is_text else ANY_JSON)


KIMI_K3 = CallTags(
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    begin="<|open|>call",
    name_ends=("<|sep|>",),
    parameter="<|open|>argument",
    parameter_ends=("<|sep|>",),
    value_ends={"<|close|>argument<|sep|>": ("<|open|>argument", "<|close|>call")},
    end="<|close|>call<|sep|>",
    outside=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    read_name=lambda text: _attributes(text).get("tool", ""),
    read_parameter=_kimi_parameter,
)


MINIMAX = _invoke_tags(
    "<", "</", "minimax:tool_call", lambda text: Parameter(_attributes(text).get("name", ""))
)


def _attributes(text: str) -> dict[str, str]:
    return {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(text)}
