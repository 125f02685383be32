"""Structural tags: free text in which some beginnings force a JSON value. Pure.

`{"structures": [{"begin": …, "schema": …, "end": …}, …], "triggers": [begin of a begin, …]}`, as in
vLLM. Once a trigger is written, one of the structures that begin with it follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_STRUCTURES = 256
FIELDS = {"begin", "schema", "end"}


@dataclass(frozen=True, slots=True)
class Structure:
    begin: str
    schema: Any
    end: str = ""


@dataclass(frozen=True, slots=True)
class StructuralTag:
    structures: tuple[Structure, ...]
    triggers: tuple[str, ...]

    def of_trigger(self, trigger: str) -> list[Structure]:
        return [each for each in self.structures if each.begin.startswith(trigger)]


def parse_structural_tag(text: str) -> StructuralTag:
    """Raises ValueError with the reason."""
    value = json.loads(text)
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("it must be an object with the lists structures and triggers")
    if not 0 < len(structures) <= MAX_STRUCTURES or not 0 < len(triggers) <= MAX_STRUCTURES:
        raise ValueError(f"it must have 1 to {MAX_STRUCTURES} structures and triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("its triggers must be texts, none empty")
    tag = StructuralTag(tuple(map(_structure, structures)), tuple(dict.fromkeys(triggers)))
    for structure in tag.structures:
        if not any(structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise ValueError(f"no trigger begins {structure.begin!r}")
    for trigger in tag.triggers:
        if not tag.of_trigger(trigger):
            raise ValueError(f"no structure begins with the trigger {trigger!r}")
        if any(other != trigger and other.startswith(trigger) for other in tag.triggers):
            raise ValueError(f"the trigger {trigger!r} begins another one")
    return tag


def _structure(value: Any) -> Structure:
    if not isinstance(value, dict) or not {"begin", "schema"} <= value.keys() <= FIELDS:
        raise ValueError("each structure must have begin and schema, and can have end")
    begin, end = value["begin"], value.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError("begin and end of a structure must be texts")
    return Structure(begin, value["schema"], end)


def lark_of_structural_tag(
    tag: StructuralTag, schema_of: Callable[[Any], str], special_ids: Mapping[str, int]
) -> str:
    """Return the grammar. `special_ids` are the special tokens, which are no text."""
    options = " | ".join(f"tag_{index}" for index in range(len(tag.triggers)))
    lines = [f"start: ({options})* TAG_TEXT", r"TAG_TEXT: /(.|\n)*/"]
    for index, trigger in enumerate(tag.triggers):
        rests = [
            f"{_literal(each.begin.removeprefix(trigger), special_ids)} "
            f"%json {schema_of(each.schema)} {_literal(each.end, special_ids)}"
            for each in tag.of_trigger(trigger)
        ]
        if trigger in special_ids:
            lines.append(f"tag_{index}: TAG_TEXT {_literal(trigger, special_ids)} rest_{index}")
        else:
            lines.append(f"begin_{index}[lazy]: TAG_TEXT {json.dumps(trigger)}")
            lines.append(f"tag_{index}: begin_{index} rest_{index}")
        lines.append(f"rest_{index}: {' | '.join(rests)}")
    return "\n".join(lines)


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
