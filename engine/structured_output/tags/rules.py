"""Rules of a grammar in Lark's notation, each once. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence

from baton.engine.structured_output.tags.tokens import ANY_TEXT, Parts, SpecialTokens, text_without


class Rules:
    def __init__(self, tokens: SpecialTokens) -> None:
        self.tokens = tokens
        self._lines: list[str] = []
        self._names: dict[Hashable, str] = {}

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def add(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def once(self, prefix: str, body: str) -> str:
        """Return the name of the rule with this body. Terminals have an uppercase prefix."""
        return self.named(prefix, (prefix, body), lambda name: [f"{name}: {body}"])

    def named(self, prefix: str, key: Hashable, lines: Callable[[str], Iterable[str]]) -> str:
        """Return the name of the rule with this key. `lines` writes the rule of a new name.

        The name is known before the rule is written, so that rules can refer to themselves.
        """
        known = self._names.get(key)
        if known is None:
            known = self._names[key] = f"{prefix}_{len(self._names)}"
            self._lines += lines(known)
        return known

    def text_before(
        self, mark: str, never: Sequence[str | Parts] = (), text: str = ANY_TEXT
    ) -> str:
        """Return an expression for a text and the first mark. `never` is not in the text.

        Parsers do not see whether a mark is its special tokens or spelled out, so a mark that has
        special tokens must not be in the text either.
        """
        if not self.tokens.are_in(mark):
            body = f"{text_without(never, text=text)} {json.dumps(mark)}"
            return self.named("text", body, lambda name: [f"{name}[lazy]: {body}"])
        prefix, rest = self.tokens.before(mark)
        body = text_without(never if mark in never else (mark, *never), text=text)
        end = f" {json.dumps(prefix)}" if prefix else ""
        return f"{self.once('TEXT', f'{body}{end}')} {rest}"
