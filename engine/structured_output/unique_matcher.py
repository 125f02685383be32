"""Matcher that keeps the items of arrays unique, which a grammar cannot.

A token is removed from the mask if it completes an item that repeats an earlier one, or if nothing
but such an item can follow it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import FIELD
from baton.engine.structured_output.grammar import Bits, Grammar, Matcher, num_words
from baton.engine.structured_output.json_scanner import (
    MARKS,
    Level,
    Mode,
    ScanState,
    begin_scan,
    scan,
)
from baton.engine.structured_output.schemas.unique_arrays import SchemaPlace

# In larger masks, only the tokens that all but complete an earlier item are checked for dead ends.
MAX_CHECKED_TOKENS = 32
MAX_SEARCHED_MASKS = 64  # of a step; about 2 ms
# Tokens that can complete an item, by the kind of text in which they begin.
_END_IN_STRING = re.compile(rb'"')
_END = re.compile(rb'[\s,\]}]|".*"', re.DOTALL)
_END_OF_OWN_ARRAY = re.compile(rb"\[.*,", re.DOTALL)  # of an array that begins in the token, too


class TokenTexts:
    """Texts of a vocabulary's tokens, and the sets of those that can complete an item."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self.ids = {text: token_id for token_id, text in reversed(list(enumerate(texts)))}
        self.ends_in_string = _bits_of(texts, _END_IN_STRING)
        self.ends = _bits_of(texts, _END)
        self.ends_own = _bits_of(texts, _END_OF_OWN_ARRAY)

    def empty_mask(self) -> Bits:
        return np.zeros(num_words(len(self.texts)), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class UniqueItems:
    """Implements `Grammar`."""

    grammar: Grammar
    root: SchemaPlace
    tokens: TokenTexts

    def matcher(self) -> Matcher:
        return _UniqueMatcher(self)


class _UniqueMatcher:
    """Implements `Matcher`."""

    def __init__(self, grammar: UniqueItems) -> None:
        self._matcher = grammar.grammar.matcher()
        self._tokens = grammar.tokens
        self._states = [begin_scan(grammar.root)]
        self._mask: Bits | None = None  # of the last state, once it is filled

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            after = scan(self._states[-1], self._tokens.texts[token_id])
            if after is None:
                raise _error("an item is repeated")
            self._push(after)
        self._matcher.advance(token_ids)

    def try_advance(self, token_id: int) -> bool:
        if self._mask is None:
            self.fill(self._tokens.empty_mask())
        # A draft must be accepted exactly if it is in the mask: the runner relies on that.
        if self._mask is None or not _contains(self._mask, token_id):
            return False
        after = scan(self._states[-1], self._tokens.texts[token_id])
        if after is None or not self._matcher.try_advance(token_id):
            return False
        self._push(after)
        return True

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        del self._states[len(self._states) - num_tokens :]
        self._mask = None

    def fill(self, allowed: Bits) -> None:
        self._matcher.fill(allowed)
        state = self._states[-1]
        for token_id in _ids_in(allowed & self._candidates(state)):
            if scan(state, self._tokens.texts[token_id]) is None:
                _remove(allowed, token_id)
        for depth, level in enumerate(state.levels):
            if level.texts:
                self._remove_dead_ends(state, depth, allowed)
        if not allowed.any():
            raise _error("only a repeated item can come next")
        self._mask = allowed.copy()

    def _push(self, state: ScanState) -> None:
        self._states.append(state)
        self._mask = None

    def _candidates(self, state: ScanState) -> Bits:
        """Return the tokens that can complete an item that repeats another."""
        if not any(level.is_unique for level in state.levels):
            return self._tokens.ends_own
        is_in_string = state.mode in (Mode.STRING, Mode.IN_NAME)
        return self._tokens.ends_in_string if is_in_string else self._tokens.ends

    def _remove_dead_ends(self, state: ScanState, depth: int, allowed: Bits) -> None:
        """Remove the tokens after which nothing is left but to repeat an item at this depth."""
        checked = _ids_in(allowed)
        if len(checked) > MAX_CHECKED_TOKENS:
            completing = self._completing(state, state.levels[depth])
            checked = [token_id for token_id in completing if _contains(allowed, token_id)]
        search = _DistinctItemSearch(self._matcher, self._tokens, depth)
        for token_id in checked:
            after = scan(state, self._tokens.texts[token_id])
            if after is not None and not search.leads_on(token_id, after):
                _remove(allowed, token_id)

    def _completing(self, state: ScanState, level: Level) -> set[int]:
        """Return the tokens with which an item is the same as another one, up to its last mark."""
        begun = state.item_text(level)
        found: set[int] = set()
        for text in level.texts:
            whole = text[:-1] if text[-1] in MARKS else text
            token_id = self._tokens.ids.get(whole.removeprefix(begun))
            if token_id is not None and text.startswith(begun):
                found.add(token_id)
        return found


class _DistinctItemSearch:
    """Search for an item of an array that is not the same as an earlier one.

    It follows the tokens that write the beginning of an earlier item. Any other token leads on.
    """

    def __init__(self, matcher: Matcher, tokens: TokenTexts, depth: int) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._depth = depth
        self._known: dict[bytes, bool] = {}  # by the item's text so far
        self._masks_left = MAX_SEARCHED_MASKS

    def leads_on(self, token_id: int, after: ScanState) -> bool:
        """Return whether an item can be completed after a token, or the search gave up."""
        begun = self._repeated(after)
        if begun is None or self._masks_left <= 0:
            return True
        if begun not in self._known:
            self._known[begun] = False  # where whitespace leads back to it
            self._known[begun] = self._leads_on_from(token_id, after)
        return self._known[begun]

    def _leads_on_from(self, token_id: int, after: ScanState) -> bool:
        if not self._matcher.try_advance(token_id):
            return True
        try:
            self._masks_left -= 1
            mask = self._tokens.empty_mask()
            self._matcher.fill(mask)
            further: list[tuple[int, ScanState]] = []
            for next_id in _ids_in(mask):
                state = scan(after, self._tokens.texts[next_id])
                if state is not None and self._repeated(state) is None:
                    return True
                if state is not None:
                    further.append((next_id, state))
            return any(self.leads_on(next_id, state) for next_id, state in further)
        finally:
            self._matcher.rollback(1)

    def _repeated(self, state: ScanState) -> bytes | None:
        """Return the current item's text if an earlier item begins with it."""
        if len(state.levels) <= self._depth:
            return None
        level = state.levels[self._depth]
        if level.begin < 0 and state.mode is Mode.AFTER:
            return None
        begun = state.item_text(level)
        return begun if any(text.startswith(begun) for text in level.texts) else None


def _bits_of(texts: Sequence[bytes], pattern: re.Pattern[bytes]) -> Bits:
    flags = np.zeros(num_words(len(texts)) * 32, dtype=np.uint8)
    flags[[index for index, text in enumerate(texts) if pattern.search(text)]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _ids_in(bits: Bits) -> list[int]:
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(flags).tolist()
    return found


def _contains(bits: Bits, token_id: int) -> bool:
    return bool(bits[token_id // 32] >> token_id % 32 & 1)


def _remove(bits: Bits, token_id: int) -> None:
    bits[token_id // 32] &= ~np.uint32(1 << token_id % 32).view(np.int32)


def _error(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{FIELD}.json cannot be enforced: {reason}, which uniqueItems forbids", FIELD
    )
