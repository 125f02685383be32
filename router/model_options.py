"""Options for the models of a router, which apply to all of them or to one by its name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from baton.checkpoint.options import Mmproj
from baton.core.errors import InvalidConfig
from baton.core.options import MODEL, Option
from baton.router.text_events.table import (
    AUTO,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    parsing_of_template,
)
from baton.router.values import Parsing


@dataclass(frozen=True, slots=True)
class ByName:
    """Value of an option for one model, or for all others."""

    value: str
    name: str = ""  # of the model; empty: all others, or that which the folder gives


def parse_models(written: Sequence[str], flag: str = "--model") -> tuple[ByName, ...]:
    """Parse folders and hub names, each of which may follow `NAME=`. Raises InvalidConfig."""
    models = tuple(_parse_model(one, flag) for one in written if one)
    _check_distinct(flag, [model.name for model in models if model.name])
    return models


def _parse_model(written: str, flag: str) -> ByName:
    name, equals, folder = written.partition("=")
    if not equals or Path(written).expanduser().exists():
        return ByName(written)
    if not (name and folder):
        raise InvalidConfig(f"{flag} {written!r}: write FOLDER or NAME=FOLDER")
    return ByName(folder, name)


def parse_tool_parsers(written: Sequence[str]) -> tuple[ByName, ...]:
    return _parse_parsers("--tool-parser", written, TOOL_FORMATS)


def parse_reasoning_parsers(written: Sequence[str]) -> tuple[ByName, ...]:
    return _parse_parsers("--reasoning-parser", written, REASONING_FORMATS)


def _parse_parsers(flag: str, written: Sequence[str], known: Collection[str]) -> tuple[ByName, ...]:
    parsers = tuple(_parse_parser(flag, one, known) for one in written if one)
    _check_distinct(flag, [parser.name for parser in parsers])
    return parsers


def _parse_parser(flag: str, written: str, known: Collection[str]) -> ByName:
    name, equals, parser = written.rpartition("=")
    choices = (AUTO, NONE, *known)
    if parser not in choices or (equals and not name):
        raise InvalidConfig(
            f"{flag} {written!r}: choose one of {', '.join(choices)}, for one model as MODEL=PARSER"
        )
    return ByName(parser, name)


def _check_distinct(flag: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfig(f"{flag} is given twice for {name or 'all models'}")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    folders: Annotated[  # of tokenizers; empty: accept token ids only
        tuple[ByName, ...],
        Option(
            "Model folder, or a name on the Hugging Face hub; one for each served model. "
            "NAME=FOLDER if its nodes serve it by another name.",
            MODEL,
            name="model",
            kind=list[str],
            parse=parse_models,
        ),
    ] = ()
    mmproj: Mmproj = ""
    tool_parsers: Annotated[
        tuple[ByName, ...],
        Option(
            "Parser of tool calls for the OpenAI API, such as hermes or llama3_json; none keeps "
            "them as text; MODEL=PARSER for one of several models. Default: by the chat template.",
            MODEL,
            name="tool_parser",
            kind=list[str],
            parse=parse_tool_parsers,
        ),
    ] = ()
    reasoning_parsers: Annotated[
        tuple[ByName, ...],
        Option(
            "Parser of reasoning for the OpenAI API, such as qwen3 or deepseek_r1; none keeps it "
            "as text; MODEL=PARSER for one of several models. Default: by the chat template.",
            MODEL,
            name="reasoning_parser",
            kind=list[str],
            parse=parse_reasoning_parsers,
        ),
    ] = ()

    def parsing_of(self, name: str = "", chat_template: str = "") -> Parsing:
        """Return the formats of a model's answers; without a name, those for all others."""
        found = parsing_of_template(chat_template)
        return Parsing(
            _of(name, self.tool_parsers, found.tools),
            _of(name, self.reasoning_parsers, found.reasoning),
        )


def _of(name: str, parsers: Sequence[ByName], by_template: str) -> str:
    by_name = {parser.name: parser.value for parser in parsers}
    chosen = by_name.get(name, by_name.get("", AUTO))
    return {AUTO: by_template, NONE: ""}.get(chosen, chosen)
