"""Incremental output parsing: independent of how the text is split, and lossless."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.core.output import Finish, FinishReason, Served
from baton.router.doors.openai.request.parsed_request import ResponseOptions
from baton.router.doors.openai.response.choices import ChatChoice, join_chunks
from baton.router.input_processing.tokenization import placeholder_text
from baton.router.text_events.events import (
    AnswerText,
    EventReader,
    OutputParser,
    TextEvent,
    fold,
)
from baton.router.text_events.formats import command
from baton.router.text_events.parsing import (
    RequiredCallsParser,
    TextFormat,
    ToolCallMode,
)
from baton.router.text_events.table import REASONING_FORMATS, TOOL_FORMATS
from baton.router.values import (
    Parsing,
    TokenChunk,
)
from tests.support.written_calls import WRITERS

TAGS = tuple(dict.fromkeys(mark for form in TOOL_FORMATS.values() for mark in form.marks if mark))
FRAGMENTS = (
    *TAGS,
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "parameters": {}}', '{"name": 1}'),
    *('{"name": "h", "arguments": {"x": "</tool_call>', '"}}', "\\"),
    *("{", "}", ";", "<", "<t", "</", "\n", " ", "text", "NaN", "🙂", "<tool_call>{}</tool_call>"),
)
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12)
parsings = st.builds(
    Parsing, st.sampled_from(["", *TOOL_FORMATS]), st.sampled_from(["", *REASONING_FORMATS])
)


def read(parser: OutputParser, chunks: Sequence[str], *, is_cut_off: bool = False) -> AnswerText:
    events: list[TextEvent] = []
    for chunk in chunks:
        events += parser.push(chunk)
    return fold([*events, *parser.finish(is_cut_off=is_cut_off)])


def split(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(texts, parsings, st.booleans(), st.data())
def test_parsing_does_not_depend_on_how_the_text_is_split(
    fragments: list[str],
    parsing: Parsing,
    is_cut_off: bool,
    data: st.DataObject,
) -> None:
    text = "".join(fragments)
    form = TextFormat(parsing, ToolCallMode.BY_MODEL)

    def read_as(chunks: list[str]) -> AnswerText:
        return read(form.parser(), chunks, is_cut_off=is_cut_off)

    assert read_as(split(text, data)) == read_as(list(text)) == read_as([text])


words = st.text(st.sampled_from("ab_ñ {}[]\"'\\,:<>/|\n"), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner),
    max_leaves=4,
)
written_calls = st.lists(
    st.tuples(st.sampled_from("fg"), st.dictionaries(st.text("xyz", min_size=1), values)),
    min_size=1,
    max_size=3,
)


@given(st.sampled_from(sorted(TOOL_FORMATS)), written_calls, st.data())
def test_streamed_calls_are_the_whole_ones_in_each_format(
    name: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    text = WRITERS[name]("", calls)
    # Formats with plain text cannot tell a text from a number by themselves.
    schema = {"type": "object", "additionalProperties": {"type": "string"}}
    is_plain = name in ("qwen3_xml", "glm45", "minimax_m2")
    tools = [{"function": {"name": each, "parameters": schema}} for each in "fg"]
    if is_plain:
        calls = [(each, dict.fromkeys(given, "w")) for each, given in calls]
        text = WRITERS[name]("", calls)

    def read_as(chunks: list[str], *, is_cut_off: bool = False) -> AnswerText:
        form = TextFormat(Parsing(name), ToolCallMode.BY_MODEL, tools=tools)
        return read(form.parser(), chunks, is_cut_off=is_cut_off)

    def calls_in(answer: AnswerText) -> list[tuple[str, dict[str, Any]]]:
        return [(call.name, json.loads(call.arguments)) for call in answer.calls]

    whole, streamed = read_as([text]), read_as(split(text, data))
    cut = read_as(split(text[: data.draw(st.integers(0, len(text)))], data), is_cut_off=True)

    assert calls_in(whole) == calls
    assert whole == streamed
    assert calls_in(cut) == calls[: len(cut.calls)]


# Harmony's headers are left out if they are cut off, however long they are. The marks of Cohere's
# Command models are left out anywhere.
OMITTING = frozenset({"openai", "openai_gptoss", "cohere_cmd"})
without_omissions = parsings.filter(
    lambda parsing: OMITTING.isdisjoint((parsing.tools, parsing.reasoning))
)


@given(texts, without_omissions)
def test_text_without_calls_loses_only_the_reasoning_tags(
    fragments: list[str], parsing: Parsing
) -> None:
    text = "".join(fragments)

    reported = read(TextFormat(parsing, ToolCallMode.BY_MODEL).parser(), [text])

    if not reported.calls:
        marks = len("<think></think>") + len(text) - len(text.lstrip())
        assert text.endswith(reported.content)
        assert reported.reasoning in text
        assert len(text) - len(reported.reasoning) - len(reported.content) <= marks


@given(texts)
def test_text_of_command_without_calls_loses_only_the_marks(fragments: list[str]) -> None:
    text = "".join(fragments).replace(command.COMMAND.begins[0], "")
    marks = "|".join(map(re.escape, command.COMMAND.others))
    content, reasoning, is_reasoning = "", "", False
    for part in re.split(f"({marks})", text):
        if part in command.COMMAND.others:
            is_reasoning = part == command.THINKING[0]
        elif is_reasoning:
            reasoning += part
        else:
            content += part

    form = TextFormat(Parsing("cohere_cmd", "cohere_cmd"), ToolCallMode.BY_MODEL)

    assert read(form.parser(), [text]) == AnswerText(content, reasoning)


names = st.text(max_size=5)
arguments = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('{}[],:"\\\n <é'), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
)
spaces = st.sampled_from([("", ""), (" ", ""), ("\n  ", " ")])


@given(st.lists(st.tuples(names, arguments, st.booleans()), min_size=1), spaces, st.data())
def test_forced_calls_are_parsed_for_any_split_of_the_text(
    calls: list[tuple[str, object, bool]], gaps: tuple[str, str], data: st.DataObject
) -> None:
    before, after = gaps
    written = [json.dumps(value, ensure_ascii=escapes) for _, value, escapes in calls]
    bodies = [
        f'{{{before}"name"{after}:{before}{json.dumps(name)},{before}"arguments":{before}{value}'
        for (name, _, _), value in zip(calls, written, strict=True)
    ]
    text = f"[{before}" + f"{after}}}{before},{before}".join(bodies) + f"{after}}}{after}]"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    reported = [read(RequiredCallsParser(), cut) for cut in ([text], chunks, list(text))]

    expected = [(name, value) for (name, _, _), value in zip(calls, written, strict=True)]
    for one in reported:
        assert [(call.name, call.arguments.rstrip()) for call in one.calls] == expected
        assert (one.content, one.reasoning) == ("", "")


@given(texts)
def test_without_parsers_all_text_is_content(fragments: list[str]) -> None:
    text = "".join(fragments)
    assert read(TextFormat(tool_calls=ToolCallMode.BY_MODEL).parser(), [text]) == AnswerText(text)


def joined(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the deltas of a stream to a message, as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: list[list[str]] = []
    for delta in deltas:
        for name in message:
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return {**message, "calls": calls}


@given(texts, parsings, st.sampled_from(FinishReason))
def test_the_chunks_of_a_chat_add_up_to_the_whole_message(
    fragments: list[str], parsing: Parsing, reason: FinishReason
) -> None:
    options = ResponseOptions(
        is_chat=True, is_streamed=True, text_format=TextFormat(parsing, ToolCallMode.BY_MODEL)
    )
    streamed, whole = (ChatChoice(0, options, placeholder_text) for _ in range(2))
    reader = EventReader(options.text_format.parser, 1)
    tokens = [TokenChunk(place, (place,), text) for place, text in enumerate(fragments)]
    served = Served("p", "d", True, "", 0, 0, "", 0, 0, 1)
    end = Finish(reason, 1, len(tokens), 0.0, 0.0, 0.0, 0.0, served)

    parts = [reader.read(0, chunk) for chunk in tokens]
    last = reader.read(0, end)
    chunks = [*map(streamed.chunk, parts, tokens), streamed.last_chunk(last, end)]
    text = fold([event for part in (*parts, last) for event in part])
    choice = whole.whole(text, join_chunks(tokens), end)

    message = choice["message"]
    sent = joined([chunk["delta"] for chunk in chunks if chunk])
    begun = sent.pop("calls")
    ended = [list(call["function"].values()) for call in message.get("tool_calls", [])]
    assert sent == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
    }
    assert len(begun) == len(ended) + text.num_unended_calls
    assert not text.num_unended_calls or choice["finish_reason"] != "tool_calls"
    assert text.num_unended_calls or begun == ended
    assert chunks[-1] is not None
    assert chunks[-1]["finish_reason"] == choice["finish_reason"]
