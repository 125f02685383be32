"""Tool calls of Gemma, `call:NAME{key:value,…}`, whose strings stand between marks. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from baton.router.text_events.call_writer import CallWriter
from baton.router.text_events.script_parser import TextBuffer, Waiting

WORDS = ("true", "false", "null")
MAX_DEPTH = 64
MAX_VALUES = 1 << 12  # of a call, each of which takes time on the event loop
_WORD_END = re.compile(r"[,}\]]")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    begin: str
    end: str
    quote: str  # on both sides of a string

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end, self.quote

    def __call__(self, source: TextBuffer, writer: CallWriter) -> Waiting[None]:
        while not source.is_at_end:
            found = yield from source.read_to((self.begin,), writer.text)
            if not found:
                continue
            source.mark()
            text = yield from self._text_of_call(source)
            call = None if text is None else self._parse(text)
            if call is not None:
                writer.call(*call)
            else:
                writer.fail_call(self.begin, source)

    def _text_of_call(self, source: TextBuffer) -> Waiting[str | None]:
        """Read to the end mark, which counts outside of strings only."""
        parts: list[str] = []
        while True:
            found = yield from source.read_to((self.end, self.quote), parts.append)
            if found != self.quote:
                return "".join(parts) if found else None
            parts.append(found)
            if not (yield from source.read_to((self.quote,), parts.append)):
                return None
            parts.append(found)

    def _parse(self, text: str) -> tuple[str, str] | None:
        name, brace, rest = text.strip().removeprefix("call:").partition("{")
        if not brace or not name.strip():
            return None
        values = _Values(brace + rest, self.quote)
        try:
            written = values.value(MAX_DEPTH)
        except ValueError:
            return None
        return (name.strip(), written) if values.is_at_end else None


class _Values:
    """Translates values to JSON, in one pass. Methods raise ValueError for anything else."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._index = text, quote, 0
        self._num_values_left = MAX_VALUES

    @property
    def is_at_end(self) -> bool:
        return not self._text[self._index :].strip()

    def value(self, depth: int) -> str:
        self._skip_space()
        self._num_values_left -= 1
        if depth == 0 or self._num_values_left < 0:
            raise ValueError("nested too deeply, or too many values")
        if self._accept("{"):
            return self._object(depth - 1)
        if self._accept("["):
            return self._list(depth - 1)
        if self._accept(self._quote):
            return self._string()
        return self._word()

    def _object(self, depth: int) -> str:
        pairs: list[str] = []
        while not self._accept("}"):
            key = self._key()
            pairs.append(f"{key}: {self.value(depth)}")
            self._separator("}")
        return "{" + ", ".join(pairs) + "}"

    def _list(self, depth: int) -> str:
        items: list[str] = []
        while not self._accept("]"):
            items.append(self.value(depth))
            self._separator("]")
        return "[" + ", ".join(items) + "]"

    def _key(self) -> str:
        self._skip_space()
        if self._accept(self._quote):
            key = self._string()
            self._expect(":")
            return key
        end = self._text.index(":", self._index)
        key = self._text[self._index : end].strip()
        self._index = end + 1
        return json.dumps(key, ensure_ascii=False)

    def _string(self) -> str:
        end = self._text.index(self._quote, self._index)
        text, self._index = self._text[self._index : end], end + len(self._quote)
        return json.dumps(text, ensure_ascii=False)

    def _word(self) -> str:
        found = _WORD_END.search(self._text, self._index)
        end = len(self._text) if found is None else found.start()
        word, self._index = self._text[self._index : end].strip(), end
        if word in WORDS or _NUMBER.fullmatch(word):
            return word
        if not word:
            raise ValueError("a value is missing")
        return json.dumps(word, ensure_ascii=False)

    def _separator(self, closing: str) -> None:
        self._skip_space()
        if not self._accept(",") and not self._text.startswith(closing, self._index):
            raise ValueError(f"expected , or {closing}")
        self._skip_space()

    def _expect(self, sign: str) -> None:
        self._skip_space()
        if not self._accept(sign):
            raise ValueError(f"expected {sign}")

    def _accept(self, sign: str) -> bool:
        self._skip_space()
        is_next = self._text.startswith(sign, self._index)
        self._index += len(sign) * is_next
        return is_next

    def _skip_space(self) -> None:
        while self._text[self._index : self._index + 1].isspace():
            self._index += 1
