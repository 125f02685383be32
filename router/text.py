"""The text boundary as the pipeline sees it: prompts in, token ids out, and back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from baton.spelling import TokenText
from baton.text import Tokenizer
from engine.errors import InvalidRequest
from router.answer import NoSpeller, Speller
from router.values import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from serving.errors import UnsupportedInput


class TextBoundary(Protocol):
    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        """Refuses, before it reads it, a text that cannot be of so few tokens."""
        ...

    def spellings(self, word: str) -> frozenset[tuple[int, ...]]:
        """The tokens that spell it, within a word and at the beginning of one."""
        ...

    def text(self, token_ids: tuple[int, ...]) -> str: ...

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template reads `tools`."""
        ...

    def token(self, token_id: int) -> TokenText:
        """One token by itself, special ones by their names."""
        ...

    def speller(self, shown: Collection[str] = ()) -> Speller:
        """Return a new one for each answer. Special tokens named in `shown` are spelled, too."""
        ...


class ModelText:
    """The boundary of a router that knows the model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text, add_special_tokens):
                self._check_length(text, max_tokens)
                return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
            case ChatPrompt(messages, add_generation_prompt, variables):
                text = self._tokenizer.render_chat(
                    [{"role": one.role, "content": one.content, **one.others} for one in messages],
                    add_generation_prompt=add_generation_prompt,
                    variables=variables,
                )
                self._check_length(text, max_tokens)
                return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None:
            return
        most = max_tokens * self._tokenizer.longest_token
        if len(text) > most:
            raise InvalidRequest(
                f"the prompt has {len(text)} characters: the model takes {max_tokens} tokens, and "
                f"these spell {most} at the most; shorten it"
            )

    def spellings(self, word: str) -> frozenset[tuple[int, ...]]:
        texts = (word, f" {word.lstrip()}")
        found = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return frozenset(filter(None, found))

    def text(self, token_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(token_ids)

    @property
    def shows_tools(self) -> bool:
        return self._tokenizer.shows_tools

    def token(self, token_id: int) -> TokenText:
        return self._tokenizer.token(token_id)

    def speller(self, shown: Collection[str] = ()) -> Speller:
        return self._tokenizer.detokenizer(shown=shown)


class TokenIdsOnly:
    """The boundary of a router that was given no tokenizer."""

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        raise _no_tokenizer()

    def spellings(self, word: str) -> frozenset[tuple[int, ...]]:
        raise _no_tokenizer()

    def text(self, token_ids: tuple[int, ...]) -> str:
        raise _no_tokenizer()

    @property
    def shows_tools(self) -> bool:
        return False

    def token(self, token_id: int) -> TokenText:
        return by_id(token_id)

    def speller(self, shown: Collection[str] = ()) -> Speller:
        return NoSpeller()


def by_id(token_id: int) -> TokenText:
    """For whoever cannot spell it, or shall not."""
    name = f"token_id:{token_id}"
    return TokenText(name, name.encode())


def _no_tokenizer() -> UnsupportedInput:
    return UnsupportedInput("this router has no tokenizer: send token ids, or give it --model")
