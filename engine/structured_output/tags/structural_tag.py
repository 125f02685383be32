"""Structural tags: free text in which some beginnings force a value. Pure.

`{"structures": [{"begin": …, "schema": …, "end": …}, …], "triggers": [begin of a begin, …]}`, as in
vLLM. Once a trigger is written, one of the structures that begin with it follows.

Baton's own form has sections of several structures:
`{"sections": [{"trigger": …, "begin": …, "structures": […], "separator": …, "end": …}, …]}`.

- Without a separator, a section has one structure. With the empty trigger, it is the whole answer.
- The schema of a structure can be a `schema_index` in the list `schemas`, next to the sections.
- The begin of a structure can be a list of texts and of what the model chooses: `{"any": …}` with
  the name of a pattern (`PATTERNS`) or a list of texts.
- The value of a structure is JSON; with `parameter`, the arguments of its schema between tags; with
  `literals`, the arguments in another notation than JSON.
- A structure with `"text": true` instead of a schema is any text up to one of the section's
  `stops`. Each structure of such a section ends with a stop, the last one can lack it.

Next to the sections, `text` describes the free text: `marks` are texts with special tokens that it
may contain, `never` are texts that it must not contain, `begins` those that it must not begin with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.structured_output.tags.tagged_parameters import ParameterTags
from baton.engine.structured_output.tags.tokens import PATTERNS, Choice, Parts

MAX_STRUCTURES = 256  # of a section, and texts in one list
MAX_SECTIONS = 4
FIELDS = {"begin", "schema", "schema_index", "end"}
WRONG_TEXTS = "begin and end of a structure must be texts"
SECTION_TEXTS = {"trigger", "begin", "separator", "end"}
SECTION_FIELDS = {*SECTION_TEXTS, "structures", "parameter", "literals", "stops"}
PARAMETER_FIELDS = {"begin", "end", "never", "json"}
TAG_FIELDS = {"sections", "schemas", "text"}
TEXT_FIELDS = {"marks", "never", "begins"}


@dataclass(frozen=True, slots=True)
class Structure:
    begin: Parts  # after the begin of the section
    schema: Any = None
    end: str = ""
    is_text: bool = False  # instead of a value of the schema


@dataclass(frozen=True, slots=True)
class LiteralNotation:
    """Python's literals, or with a quote Gemma's values, whose strings stand between quotes."""

    quote: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    trigger: str  # empty: the section is the whole answer
    structures: tuple[Structure, ...]
    begin: str = ""  # after the trigger
    separator: str | None = None  # None: one structure
    end: str = ""
    stops: tuple[str, ...] = ()
    notation: ParameterTags | LiteralNotation | None = None  # None: the values are JSON


@dataclass(frozen=True, slots=True)
class FreeText:
    marks: tuple[str, ...] = ()
    never: tuple[Parts, ...] = ()
    begins: tuple[Parts, ...] = ()


@dataclass(frozen=True, slots=True)
class StructuralTag:
    sections: tuple[Section, ...]
    text: FreeText = FreeText()

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
        if not isinstance(begin, str) or len(structure.begin) > 1 or structure.is_text:
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
    sections, schemas = value["sections"], value.get("schemas", [])
    is_list = isinstance(sections, list) and isinstance(schemas, list)
    if not is_list or not 0 < len(sections) <= MAX_SECTIONS or not value.keys() <= TAG_FIELDS:
        raise ValueError(
            f"it must have 1 to {MAX_SECTIONS} sections, and can have schemas and text"
        )
    found = tuple(_section(each, schemas) for each in sections)
    if len({each.notation for each in found}) > 1:  # each of which would write all schemas again
        raise ValueError("its sections must have the same parameter or literals")
    tag = StructuralTag(found, _free_text(value.get("text", {})))
    _check_triggers(tag.triggers)  # an empty one begins all others, so it is the only one
    return tag


def _free_text(value: Any) -> FreeText:
    if not isinstance(value, dict) or not value.keys() <= TEXT_FIELDS:
        raise ValueError("text must be an object, and can have marks, never and begins")
    never, begins = (value.get(name, []) for name in ("never", "begins"))
    if not all(isinstance(each, list) and len(each) <= MAX_STRUCTURES for each in (never, begins)):
        raise ValueError(f"never and begins must be lists of at most {MAX_STRUCTURES}")
    marks = _texts("marks", value.get("marks", []))
    return FreeText(marks, tuple(map(_parts, never)), tuple(map(_parts, begins)))


def _section(value: Any, schemas: Sequence[Any]) -> Section:
    if not isinstance(value, dict) or not {"trigger", "structures"} <= value.keys():
        raise ValueError("each section must have trigger and structures")
    texts = [value[name] for name in SECTION_TEXTS if name in value]
    if not value.keys() <= SECTION_FIELDS or not all(isinstance(text, str) for text in texts):
        raise ValueError("trigger, begin, separator and end of a section must be texts")
    given = value["structures"]
    if not isinstance(given, list) or not 0 < len(given) <= MAX_STRUCTURES:
        raise ValueError(f"each section must have 1 to {MAX_STRUCTURES} structures")
    structures = tuple(_structure(each, schemas) for each in given)
    stops = _texts("stops", value.get("stops", []))
    if any(each.is_text for each in structures) and not stops:
        raise ValueError("a section with a structure that is text must have stops")
    return Section(
        value["trigger"],
        structures,
        value.get("begin", ""),
        value.get("separator"),
        value.get("end", ""),
        stops,
        _notation(value),
    )


def _notation(value: Mapping[str, Any]) -> ParameterTags | LiteralNotation | None:
    if "parameter" in value and "literals" in value:
        raise ValueError("a section cannot have both parameter and literals")
    if "parameter" in value:
        return _parameter(value["parameter"])
    match value.get("literals"):
        case None:
            return None
        case "python":
            return LiteralNotation()
        case {"quote": str(quote), **others} if quote and not others:
            return LiteralNotation(quote)
    raise ValueError('literals must be "python" or {"quote": …}')


def _parameter(value: Any) -> ParameterTags:
    if not isinstance(value, dict) or not {"begin", "end"} <= value.keys() <= PARAMETER_FIELDS:
        raise ValueError("parameter must have begin and end, and can have never and json")
    begin, end = _texts("begin and end of parameter", [value["begin"], value["end"]])
    json_begin = _parts(value["json"]) if "json" in value else ()
    return ParameterTags(begin, end, _texts("never", value.get("never", [])), json_begin)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list) and len(value) <= MAX_STRUCTURES
    if not is_list or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{name} must be texts, none empty, at most {MAX_STRUCTURES}")
    return tuple(value)


def _structure(value: Any, schemas: Sequence[Any] = ()) -> Structure:
    if isinstance(value, dict) and value.get("text") is True and value.keys() == {"begin", "text"}:
        return Structure(_parts(value["begin"]), is_text=True)
    has_schema = isinstance(value, dict) and len({"schema", "schema_index"} & value.keys()) == 1
    if not has_schema or not {"begin"} <= value.keys() <= FIELDS:
        raise ValueError("each structure must have begin and schema, and can have end")
    end, index = value.get("end", ""), value.get("schema_index")
    if not isinstance(end, str):
        raise ValueError(WRONG_TEXTS)
    if "schema" in value:
        return Structure(_parts(value["begin"]), value["schema"], end)
    if not isinstance(index, int) or not 0 <= index < len(schemas):
        raise ValueError(f"schema_index must be less than the number of schemas, {len(schemas)}")
    return Structure(_parts(value["begin"]), schemas[index], end)


def _parts(value: Any) -> Parts:
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_STRUCTURES
    return tuple(map(_part, value if is_list else [value]))


def _part(value: Any) -> str | Choice:
    if isinstance(value, str):
        return value
    choice = value.get("any") if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(choice, str) and choice in PATTERNS:
        return Choice(pattern=PATTERNS[choice])
    if not isinstance(choice, list) or not choice:
        raise ValueError(WRONG_TEXTS)
    return Choice(_texts("any", choice))
