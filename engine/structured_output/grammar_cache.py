"""Cache of what compiling grammars has given, by grammar. Not thread-safe."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from baton.core.structured_outputs import StructuredOutputs

Value = TypeVar("Value")


class GrammarCache(Generic[Value]):
    """Evicts the least recently used grammars beyond a number, and beyond characters in all."""

    def __init__(self, max_grammars: int, max_characters: int) -> None:
        self._max_grammars = max_grammars
        self._max_characters = max_characters
        self._values: OrderedDict[StructuredOutputs, Value] = OrderedDict()
        self._num_characters = 0

    def get(self, params: StructuredOutputs) -> Value | None:
        value = self._values.get(params)
        if value is not None:
            self._values.move_to_end(params)
        return value

    def add(self, params: StructuredOutputs, value: Value) -> None:
        """Add a grammar that is not in the cache."""
        self._values[params] = value
        self._num_characters += len(params.text)
        while len(self._values) > self._max_grammars or (
            self._num_characters > self._max_characters
        ):
            oldest, _ = self._values.popitem(last=False)
            self._num_characters -= len(oldest.text)
