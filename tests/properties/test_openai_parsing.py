"""Incremental output parsing: independent of how the text is split, and lossless."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.router.text_events.forced_calls import RequiredCallsParser
from baton.router.text_events.output_parsers import (
    NOTHING,
    REASONING_BEGINS_INSIDE,
    TOOL_READERS,
    Delta,
    OutputParser,
    Parsing,
)

FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "parameters": {}}', '{"name": 1}'),
    *('{"name": "h", "arguments": {"x": "</tool_call>', '"}}', "\\"),
    *("{", "}", ";", "<", "<t", "</", "\n", " ", "text", "NaN", "🙂", "<tool_call>{}</tool_call>"),
)
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12)
parsings = st.builds(
    Parsing, st.sampled_from(["", *TOOL_READERS]), st.sampled_from(["", *REASONING_BEGINS_INSIDE])
)


def read(reader: OutputParser, pieces: Sequence[str], *, is_cut_off: bool = False) -> Delta:
    reported = NOTHING
    for piece in pieces:
        reported += reader.push(piece)
    return reported + reader.finish(is_cut_off=is_cut_off)


@given(texts, parsings, st.booleans(), st.data())
def test_parsing_does_not_depend_on_how_the_text_is_split(
    fragments: list[str], parsing: Parsing, is_cut_off: bool, data: st.DataObject
) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def read_as(pieces: list[str]) -> Delta:
        return read(parsing.reader(with_tools=True), pieces, is_cut_off=is_cut_off)

    assert read_as(pieces) == read_as(list(text)) == read_as([text])


@given(texts, parsings)
def test_without_calls_nothing_is_lost_but_the_marks_around_reasoning(
    fragments: list[str], parsing: Parsing
) -> None:
    text = "".join(fragments)

    reported = read(parsing.reader(with_tools=True), [text])

    if not reported.calls:
        marks = len("<think></think>") + len(text) - len(text.lstrip())
        assert text.endswith(reported.content)
        assert reported.reasoning in text
        assert len(text) - len(reported.reasoning) - len(reported.content) <= marks


names = st.text(max_size=5)
arguments = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('{}[],:"\\\n <é'), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
)
spaces = st.sampled_from([("", ""), (" ", ""), ("\n  ", " ")])


@given(st.lists(st.tuples(names, arguments, st.booleans()), min_size=1), spaces, st.data())
def test_however_forced_calls_are_cut_all_of_them_are_read(
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
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    reported = [read(RequiredCallsParser(), cut) for cut in ([text], pieces, list(text))]

    expected = [(name, value) for (name, _, _), value in zip(calls, written, strict=True)]
    for one in reported:
        assert [(call.name, call.arguments.rstrip()) for call in one.calls] == expected
        assert (one.content, one.reasoning) == ("", "")


@given(texts)
def test_without_parsers_all_is_content(fragments: list[str]) -> None:
    text = "".join(fragments)
    assert read(Parsing().reader(with_tools=True), [text]) == Delta(text)
