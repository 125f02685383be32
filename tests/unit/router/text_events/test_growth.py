"""Time of the parsers of answers: in proportion to the text, whatever the model writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

import pytest

from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.text_events.table import REASONING_FORMATS, TOOL_FORMATS
from baton.router.values import Parsing
from tests.support.growth import MAX_RATIO, MAX_TRIES, cpu_time_s, growth
from tests.support.written_calls import WRITERS

NUM_CHARACTERS = 256
TOKEN = 8
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"x": {"type": "string"}, "a": {"type": "array"}}},
        },
    }
]
# What a text is filled up with, to its length.
FILLERS = ("a", " ", '"', "[", "1,", 'a="', '{"name": "f", ')
FILLERS_OF_MARKS = FILLERS[:3]

MakeText = Callable[[int], str]
# Two names of one format are tested once.
FORMATS = {
    **{
        name: Parsing(tools=name)
        for name in {id(each): name for name, each in TOOL_FORMATS.items()}.values()
    },
    **{f"reasoning {name}": Parsing(reasoning=name) for name in REASONING_FORMATS},
}
FORCED = (ToolCallMode.NAMED, ToolCallMode.REQUIRED)


def filled(begin: str, filler: str, size: int) -> str:
    return begin + filler * (size // len(filler))


def marks_of(parsing: Parsing) -> tuple[str, ...]:
    form = TextFormat(parsing, ToolCallMode.BY_MODEL, tools=TOOLS)
    return tuple(filter(None, dict.fromkeys(form.marks)))


def marked_texts(parsing: Parsing) -> dict[str, MakeText]:
    """Return texts of marks, and of what follows each mark."""
    marks = marks_of(parsing)
    texts: dict[str, MakeText] = {repr(filler): partial(filled, "", filler) for filler in FILLERS}
    for mark in marks:
        texts[f"only {mark}"] = partial(filled, "", mark)
        for filler in FILLERS_OF_MARKS:
            texts[f"{mark!r} and {filler!r}"] = partial(filled, mark, filler)
    texts["all marks"] = partial(filled, "", "".join(marks) or "-")
    return texts


def written_texts(name: str) -> dict[str, MakeText]:
    """Return calls as models write them, large and many, and a call that does not end."""
    write = partial(WRITERS[name], "")
    begun = write([("f", {"x": "@"})]).partition("@")[0]
    return {
        "many calls": lambda size: write([("f", {"x": "a"})] * (size // 64)),
        "many arguments": lambda size: write([("f", {f"p{n}": "a" for n in range(size // 32)})]),
        "many lists": lambda size: write([("f", {f"p{n}": [n] for n in range(size // 32)})]),
        "a long text": lambda size: write([("f", {"x": "a, b\n" * (size // 5)})]),
        "a long list": lambda size: write([("f", {"a": [1] * (size // 3)})]),
        "a long name": lambda size: write([("f" * size, {"x": "a"})]),
        "a long argument's name": lambda size: write([("f", {"x" * size: "a"})]),
        **{f"begun, and {filler!r}": partial(filled, begun, filler) for filler in FILLERS},
    }


def check(form: TextFormat, texts: Mapping[str, MakeText]) -> None:
    """Assert for each text that tokens, and the whole text at once, take linear time."""

    def parse(make: MakeText, step: int, size: int) -> None:
        text = make(size)
        parser = form.parser()
        for start in range(0, len(text), step or len(text)):
            parser.push(text[start : start + (step or len(text))])
        parser.finish()

    slow = {
        (name, "in tokens" if step else "at once"): ratio
        for name, make in texts.items()
        for step in (TOKEN, 0)
        if (ratio := growth(partial(parse, make, step), NUM_CHARACTERS)) > MAX_RATIO
    }
    assert not slow


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_parsed_in_linear_time(name: str) -> None:
    parsing = FORMATS[name]
    form = TextFormat(parsing, ToolCallMode.BY_MODEL, tools=TOOLS)
    written = written_texts(parsing.tools) if parsing.tools else {}

    check(form, {**marked_texts(parsing), **written})


@pytest.mark.parametrize("mode", FORCED)
def test_forced_calls_are_parsed_in_linear_time(mode: ToolCallMode) -> None:
    begun = '[{"name": "f", "arguments": '
    texts: dict[str, MakeText] = {
        "many calls": lambda size: f"[{', '.join([begun[1:] + '{}}'] * (size // 32))}]",
        **{f"begun, and {filler!r}": partial(filled, begun, filler) for filler in FILLERS},
        **{repr(filler): partial(filled, "", filler) for filler in FILLERS},
        "a long name": partial(filled, '[{"name": "', "f"),
    }

    check(TextFormat(tool_calls=mode, function="f", tools=TOOLS), texts)


def test_the_end_of_a_large_call_takes_little_more_than_reading_its_json() -> None:
    """It is one turn of the event loop, however the call has arrived."""
    arguments = {"a": [{"k": 1, "s": "ab"}] * 4000}
    begun = WRITERS["hermes"]("", [("f", arguments)]).rpartition("}")[0]
    written = json.dumps(arguments)

    def after_arrival_s(reads_alone: bool) -> float:
        """Return a time after the call has arrived: little of it is in the processor's caches."""
        parser = TextFormat(Parsing(tools="hermes"), ToolCallMode.BY_MODEL, tools=TOOLS).parser()
        parser.push(begun)
        return cpu_time_s(lambda: json.loads(written) if reads_alone else parser.push("}"))

    pairs_s = [(after_arrival_s(False), after_arrival_s(True)) for _ in range(MAX_TRIES)]
    ends_s, reads_s = zip(*pairs_s, strict=True)
    assert min(ends_s) < 3 * min(reads_s)
