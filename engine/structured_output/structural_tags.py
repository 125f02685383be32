"""Structural tags: free text in which some beginnings force a JSON value. Pure.

`{"structures": [{"begin": …, "schema": …, "end": …}, …], "triggers": [begin of a begin, …]}`, as in
vLLM. Once a trigger is written, one of the structures that begin with it follows.

Baton's own form has sections of several structures: `{"sections": [{"trigger": …, "begin": …,
"structures": […], "separator": …, "end": …}, …]}`. Without a separator, a section has one
structure. With the empty trigger, a section is the whole answer, and free text cannot begin with
`{`. The begin of a structure can be a list of texts and `{"any": "number"}` or `{"any": "id"}`.
With `parameter`, a structure has no JSON value, but the arguments of its schema between tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.structured_output.tagged_parameters import (
    ParameterTags,
    parameters,
    text_rule,
)

MAX_STRUCTURES = 256
FIELDS = {"begin", "schema", "end"}
WRONG_TEXTS = "begin and end of a structure must be texts"
SECTION_FIELDS = {"trigger", "begin", "structures", "separator", "end", "parameter"}
PARAMETER_FIELDS = {"begin", "end", "never"}
# Texts that a model chooses inside the begin of a structure, as regular expressions.
PATTERNS = {"number": "[0-9]{1,4}", "id": "[a-zA-Z0-9]{9}"}
FREE_TEXT = r"/(.|\n)*/"
NO_OBJECT = r"/\s*([^{\s](.|\n)*)?/"


@dataclass(frozen=True, slots=True)
class Pattern:
    name: str


Begin = tuple[str | Pattern, ...]


@dataclass(frozen=True, slots=True)
class Structure:
    begin: Begin  # after the begin of the section
    schema: Any
    end: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    trigger: str  # empty: the section is the whole answer
    structures: tuple[Structure, ...]
    begin: str = ""  # after the trigger
    separator: str | None = None  # None: one structure
    end: str = ""
    parameter: ParameterTags | None = None  # None: the values are JSON


@dataclass(frozen=True, slots=True)
class StructuralTag:
    sections: tuple[Section, ...]

    @property
    def triggers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.trigger for each in self.sections))

    def of_trigger(self, trigger: str) -> list[Section]:
        return [each for each in self.sections if each.trigger == trigger]


def parse_structural_tag(text: str) -> StructuralTag:
    """Raises ValueError with the reason."""
    value = json.loads(text)
    if isinstance(value, dict) and "sections" in value:
        return _parse_sections(value)
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("it must be an object with the lists structures and triggers")
    if not 0 < len(structures) <= MAX_STRUCTURES or not 0 < len(triggers) <= MAX_STRUCTURES:
        raise ValueError(f"it must have 1 to {MAX_STRUCTURES} structures and triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("its triggers must be texts, none empty")
    return StructuralTag(_sections_of(structures, list(dict.fromkeys(triggers))))


def _sections_of(structures: Sequence[Any], triggers: Sequence[str]) -> tuple[Section, ...]:
    """Return a section for each trigger, with the structures that it begins."""
    begun: dict[str, list[Structure]] = {trigger: [] for trigger in triggers}
    for structure in map(_structure, structures):
        begin = structure.begin[0]
        if not isinstance(begin, str) or len(structure.begin) > 1:
            raise ValueError(WRONG_TEXTS)
        matching = [trigger for trigger in triggers if begin.startswith(trigger)]
        if not matching:
            raise ValueError(f"no trigger begins {begin!r}")
        for trigger in matching:
            rest = (begin.removeprefix(trigger),)
            begun[trigger].append(Structure(rest, structure.schema, structure.end))
    for trigger, found in begun.items():
        if not found:
            raise ValueError(f"no structure begins with the trigger {trigger!r}")
    _check_triggers(triggers)
    return tuple(Section(trigger, tuple(found)) for trigger, found in begun.items())


def _check_triggers(triggers: Sequence[str]) -> None:
    for trigger in triggers:
        if any(other != trigger and other.startswith(trigger) for other in triggers):
            raise ValueError(f"the trigger {trigger!r} begins another one")


def _parse_sections(value: Mapping[str, Any]) -> StructuralTag:
    sections = value["sections"]
    if len(value) != 1 or not isinstance(sections, list) or not sections:
        raise ValueError("with sections, it must be a list of them and nothing else")
    tag = StructuralTag(tuple(map(_section, sections)))
    if sum(len(each.structures) for each in tag.sections) > MAX_STRUCTURES:
        raise ValueError(f"its sections must have 1 to {MAX_STRUCTURES} structures")
    _check_triggers(tag.triggers)  # an empty one begins all others, so it is the only one
    return tag


def _section(value: Any) -> Section:
    if not isinstance(value, dict) or not {"trigger", "structures"} <= value.keys():
        raise ValueError("each section must have trigger and structures")
    names = SECTION_FIELDS - {"structures", "parameter"}
    texts = [value[name] for name in names if name in value]
    is_known = value.keys() <= SECTION_FIELDS and all(isinstance(text, str) for text in texts)
    structures = value["structures"]
    if not is_known or not isinstance(structures, list) or not structures:
        raise ValueError("trigger, begin, separator and end of a section must be texts")
    return Section(
        value["trigger"],
        tuple(map(_structure, structures)),
        value.get("begin", ""),
        value.get("separator"),
        value.get("end", ""),
        _parameter(value["parameter"]) if "parameter" in value else None,
    )


def _parameter(value: Any) -> ParameterTags:
    if not isinstance(value, dict) or not {"begin", "end"} <= value.keys() <= PARAMETER_FIELDS:
        raise ValueError("parameter must have begin and end, and can have never")
    never = value.get("never", [])
    texts = [value["begin"], value["end"], *(never if isinstance(never, list) else [None])]
    if not all(isinstance(text, str) and text for text in texts) or len(texts) > MAX_STRUCTURES:
        raise ValueError("begin, end and never of parameter must be texts, none empty")
    return ParameterTags(value["begin"], value["end"], tuple(never))


def _structure(value: Any) -> Structure:
    if not isinstance(value, dict) or not {"begin", "schema"} <= value.keys() <= FIELDS:
        raise ValueError("each structure must have begin and schema, and can have end")
    begin, end = value["begin"], value.get("end", "")
    parts = begin if isinstance(begin, list) and 0 < len(begin) <= MAX_STRUCTURES else [begin]
    if not isinstance(end, str):
        raise ValueError(WRONG_TEXTS)
    return Structure(tuple(map(_part, parts)), value["schema"], end)


def _part(value: Any) -> str | Pattern:
    if isinstance(value, str):
        return value
    name = value.get("any") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(name, str) or name not in PATTERNS:
        raise ValueError(WRONG_TEXTS)
    return Pattern(name)


def lark_of_structural_tag(
    tag: StructuralTag, schema_of: Callable[[Any], str], special_ids: Mapping[str, int]
) -> str:
    """Return the grammar. `special_ids` are the special tokens, which are no text."""
    if tag.triggers == ("",):
        lines = ["start: rest_0 | TAG_TEXT", f"TAG_TEXT: {NO_OBJECT}"]
    else:
        options = " | ".join(f"tag_{index}" for index in range(len(tag.triggers)))
        lines = [f"start: ({options})* TAG_TEXT", f"TAG_TEXT: {FREE_TEXT}"]
    for index, trigger in enumerate(tag.triggers):
        if trigger in special_ids:
            lines.append(f"tag_{index}: TAG_TEXT {_literal(trigger, special_ids)} rest_{index}")
        elif trigger:
            lines.append(f"begin_{index}[lazy]: TAG_TEXT {json.dumps(trigger)}")
            lines.append(f"tag_{index}: begin_{index} rest_{index}")
        bodies = []
        for number, section in enumerate(tag.of_trigger(trigger)):
            name = f"one_{index}_{number}"
            if section.parameter is not None:
                lines.append(text_rule(f"text_{name}", section.parameter, special_ids))
            lines.append(f"{name}: {_structures(section, name, schema_of, special_ids)}")
            bodies.append(_body(section, name, special_ids))
        lines.append(f"rest_{index}: {' | '.join(bodies)}")
    return "\n".join(lines)


def _body(section: Section, name: str, special_ids: Mapping[str, int]) -> str:
    begin, end = (_literal(text, special_ids) for text in (section.begin, section.end))
    if section.separator is None:
        return f"{begin} {name} {end}"
    return f"{begin} {name} ({_literal(section.separator, special_ids)} {name})* {end}"


def _structures(
    section: Section,
    name: str,
    schema_of: Callable[[Any], str],
    special_ids: Mapping[str, int],
) -> str:
    def literal(text: str) -> str:
        return _literal(text, special_ids)

    def value(schema: Any) -> str:
        if section.parameter is None:
            return f"%json {schema_of(schema)}"
        return parameters(schema, section.parameter, f"text_{name}", literal, schema_of)

    return " | ".join(
        f"{_begin(each.begin, special_ids)} {value(each.schema)} {literal(each.end)}"
        for each in section.structures
    )


def _begin(begin: Begin, special_ids: Mapping[str, int]) -> str:
    return " ".join(
        f"/{PATTERNS[part.name]}/" if isinstance(part, Pattern) else _literal(part, special_ids)
        for part in begin
    )


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Return a text in Lark's notation, with its special tokens by their ids."""
    parts = [text] if not special_ids else _split(text, sorted(special_ids, key=len, reverse=True))
    written = (
        f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part)
        for part in parts
        if part
    )
    return " ".join(written)


def _split(text: str, specials: Sequence[str]) -> list[str]:
    return re.split(f"({'|'.join(map(re.escape, specials))})", text)
