"""However a text is cut, the same is read out of it, and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.openai.parsing import (
    NOTHING,
    REASONING_BEGINS_INSIDE,
    TOOL_READERS,
    Delta,
    Parsing,
    Reader,
)

FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "parameters": {}}', '{"name": 1}'),
    *("{", "}", ";", "<", "<t", "</", "\n", " ", "text", "NaN", "🙂", "<tool_call>{}</tool_call>"),
)
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12)
parsings = st.builds(
    Parsing, st.sampled_from(["", *TOOL_READERS]), st.sampled_from(["", *REASONING_BEGINS_INSIDE])
)


def read(reader: Reader, pieces: Sequence[str]) -> Delta:
    told = NOTHING
    for piece in pieces:
        told += reader.push(piece)
    return told + reader.finish()


@given(texts, parsings, st.data())
def test_however_a_text_is_cut_the_same_is_read(
    fragments: list[str], parsing: Parsing, data: st.DataObject
) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole = read(parsing.reader(with_tools=True), [text])

    assert read(parsing.reader(with_tools=True), pieces) == whole
    assert read(parsing.reader(with_tools=True), list(text)) == whole


@given(texts, parsings)
def test_without_calls_nothing_is_lost_but_the_marks_around_reasoning(
    fragments: list[str], parsing: Parsing
) -> None:
    text = "".join(fragments)

    told = read(parsing.reader(with_tools=True), [text])

    if not told.calls:
        marks = len("<think></think>") + len(text) - len(text.lstrip())
        assert text.endswith(told.content)
        assert told.reasoning in text
        assert len(text) - len(told.reasoning) - len(told.content) <= marks


@given(texts)
def test_without_parsers_all_is_content(fragments: list[str]) -> None:
    text = "".join(fragments)
    assert read(Parsing().reader(with_tools=True), [text]) == Delta(text)
