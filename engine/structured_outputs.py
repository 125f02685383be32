"""The form that an answer must have, as asked for. Whether it can be kept to is found out later."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.errors import InvalidRequest

FIELD = "structured_outputs"
# Schemas, expressions and grammars come from strangers: what compiles them takes no more.
MOST_CHARACTERS = {"json": 1 << 16, "regex": 1 << 12, "choice": 1 << 16, "grammar": 1 << 14}
MOST_CHOICES = 1024
FORMS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """One of the five; names and meanings are vLLM's."""

    json: str | None = None  # a JSON schema
    json_object: bool = False  # any JSON object
    regex: str | None = None  # of the whole answer
    choice: tuple[str, ...] = ()
    grammar: str | None = None  # in Lark's notation, or in GBNF
    disable_any_whitespace: bool = False  # JSON without any that does not belong to a string

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InvalidRequest(
                f"{FIELD} must have one of {', '.join(FORMS)}; it has {found}", FIELD
            )
        if self.disable_any_whitespace and not given[0].startswith("json"):
            raise InvalidRequest(f"disable_any_whitespace says nothing of a {given[0]}", FIELD)
        self._check_size()
        self._check_choices()

    @property
    def form(self) -> str:
        """Which one it is."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False, ()))

    @property
    def text(self) -> str:
        """All of it, in a row."""
        return "".join(filter(None, (self.json, self.regex, self.grammar, *self.choice)))

    def _check_size(self) -> None:
        num_characters, most = len(self.text), MOST_CHARACTERS.get(self.form, 0)
        if num_characters > most:
            raise InvalidRequest(
                f"{FIELD}.{self.form} has {num_characters} characters; at most {most} may be", FIELD
            )

    def _check_choices(self) -> None:
        if len(self.choice) > MOST_CHOICES:
            raise InvalidRequest(
                f"{FIELD}.choice has {len(self.choice)} texts; at most {MOST_CHOICES} may be", FIELD
            )
        if not all(self.choice):
            raise InvalidRequest(f"{FIELD}.choice has an empty text", FIELD)


FIELD_NAMES = tuple(field.name for field in fields(StructuredOutputs))
