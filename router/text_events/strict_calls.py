"""Structural tags of calls that strict tools constrain: the notations of a format. Pure."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_VARIABLE = re.compile(r"\$(number|id)")
_NAME = re.compile(r"\$(?:name|quoted|escaped)")
Texts = Sequence[str]  # of which the model chooses one


@dataclass(frozen=True, slots=True)
class StrictCalls:
    """Calls of one notation: trigger, begin, calls with separators between them, end.

    `call` is the text before the arguments, in parts if the model chooses among some texts. It has
    `$name`, `$quoted` (the name as JSON) or `$escaped` (as in HTML), and `$number` and `$id`, which
    the model chooses.
    """

    trigger: str  # empty: the calls are the whole answer
    call: str | Sequence[str | Texts]
    call_end: str = ""
    begin: str = ""
    separator: str | None = None  # None: each call has its trigger
    end: str = ""
    parameter: Mapping[str, Any] | None = None  # tags of one argument
    literals: Any = None  # notation of the values; without both, arguments are JSON
    texts: Texts = ()  # begins of texts between calls
    stops: Texts = ()  # ends of these texts and of calls

    def section(self, names: Sequence[str]) -> dict[str, Any]:
        """Return a section of a structural tag, for functions by the index of their schemas."""
        structures: list[dict[str, Any]] = [
            {"begin": list(self._begin(name)), "schema_index": index, "end": self.call_end}
            for index, name in enumerate(names)
        ]
        structures += [{"begin": text, "text": True} for text in self.texts]
        texts = {"trigger": self.trigger, "begin": self.begin, "end": self.end}
        optional = {
            "separator": self.separator,
            "parameter": self.parameter,
            "literals": self.literals,
            "stops": list(self.stops) or None,
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return {**texts, **given, "structures": structures}

    def _begin(self, name: str) -> Iterator[Any]:
        """Split the text at what the model chooses, and insert the name."""
        names = {
            "$quoted": json.dumps(name, ensure_ascii=False),
            "$escaped": html.escape(name),
            "$name": name,
        }
        for part in [self.call] if isinstance(self.call, str) else self.call:
            if not isinstance(part, str):
                yield {"any": list(part)}
                continue
            for index, text in enumerate(_VARIABLE.split(part)):
                yield {"any": text} if index % 2 else _NAME.sub(lambda found: names[found[0]], text)


def _any_name(_name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StrictFormat:
    """Notations of a format, and what its free text can be."""

    notations: Sequence[StrictCalls]
    marks: Texts = ()  # texts with special tokens that are no calls
    never: Sequence[str | Sequence[Any]] = ()  # in free text; in parts, with patterns
    begins: Sequence[str | Sequence[Any]] = ()  # of calls that are the whole answer
    can_call: Callable[[str], bool] = _any_name  # a function of this name

    def structural_tag(self, functions: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """Return the constraint of an answer, for functions with schemas of their arguments."""
        names, schemas = zip(*functions, strict=True)
        sections = [each.section(names) for each in self.notations]
        text = {"marks": self.marks, "never": self.never, "begins": self.begins}
        given = {key: list(value) for key, value in text.items() if value}
        tag = {"sections": sections, "schemas": schemas}
        return {**tag, "text": given} if given else tag
