"""Text boundary of the pipeline: prompts to token ids and back."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from baton.checkpoint.text_pairs import EncodedText
from baton.checkpoint.token_text import TokenText
from baton.checkpoint.tokenizer import Tokenizer
from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.router.answer import IncrementalDetokenizer, NoDetokenizer
from baton.router.parts import template_content
from baton.router.pictures.placement import put_texts, segments_in
from baton.router.pictures.plan import PictureFormat
from baton.router.values import ChatPrompt, PairPrompt, Prompt, TextPrompt, TokenPrompt
from baton.rpc.errors import UnsupportedInput

NUM_END_TOKENS = 16  # of a prompt: more than a chat template adds at its end


class TextBoundary:
    """Text boundary of the pipeline. Without a tokenizer, as here, it accepts token ids only."""

    def __init__(self, model: str = "") -> None:
        self._model = model  # the one without a tokenizer; empty: any

    @property
    def supports_tools(self) -> bool:
        """True if the chat template reads `tools`."""
        return False

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        """Tokenise a prompt.

        Raises ContextLengthExceeded, before tokenising, for a text that must exceed `max_tokens`.
        """
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        raise _no_tokenizer_error(self._model)

    def tokenize(self, prompt: Prompt, max_tokens: int | None = None) -> TokenPrompt:
        """Tokenise a prompt, which can have images. Raises as `token_ids` does."""
        if isinstance(prompt, TokenPrompt) and prompt.media:
            return prompt
        return TokenPrompt(self.token_ids(prompt, max_tokens))

    def encode_prediction(self, text: str, max_tokens: int | None) -> tuple[int, ...]:
        """Return the tokens of a text that an answer may repeat, without those that do not fit."""
        raise _no_tokenizer_error(self._model)

    def spellings(self, word: str) -> frozenset[tuple[int, ...]]:
        """Return the token sequences of `word`, inside and at the beginning of a word."""
        raise _no_tokenizer_error(self._model)

    def text(self, token_ids: tuple[int, ...], *, skip_special_tokens: bool = True) -> str:
        raise _no_tokenizer_error(self._model)

    def end_of(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of the last tokens of a prompt, with special tokens."""
        return ""

    def encode_text(
        self, prompt: Prompt, max_tokens: int | None, cut_at: int | None
    ) -> EncodedText:
        """Tokenise a text or a pair of texts to embed, and cut it to `cut_at` tokens.

        Raises ContextLengthExceeded as `token_ids` does, unless it is cut.
        """
        token_ids = self.token_ids(prompt, None if cut_at else max_tokens)
        is_cut = cut_at is not None and len(token_ids) > cut_at
        return EncodedText(token_ids[:cut_at], is_cut=is_cut)

    def check_own_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Raise InvalidRequest for a text that an encoder's own tokenizer cannot have made."""

    def token(self, token_id: int) -> TokenText:
        """Return the text of a single token, or the name of a special token."""
        return placeholder_text(token_id)

    def create_detokenizer(self, shown: Collection[str] = ()) -> IncrementalDetokenizer:
        """Return a new detokenizer for one answer. It includes the special tokens in `shown`."""
        return NoDetokenizer()


class ModelText(TextBoundary):
    """Text boundary of a router with the model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, images: PictureFormat | None = None) -> None:
        """`images`: how the model takes them; None: it takes text alone."""
        super().__init__()
        self._tokenizer = tokenizer
        self.images = images

    def tokenize(self, prompt: Prompt, max_tokens: int | None = None) -> TokenPrompt:
        images = prompt.images if isinstance(prompt, ChatPrompt) else []
        if not isinstance(prompt, ChatPrompt) or not images or self.images is None:
            return super().tokenize(prompt, max_tokens)
        text = put_texts(self._render(prompt), images, self.images)
        self._check_length(text, max_tokens, "messages")
        token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        [placeholder_id] = self._tokenizer.encode_mark(self.images.placeholder)
        pictures = {each.digest: each for image in images for each in image.pictures}
        segments = segments_in(token_ids, images, placeholder_id)
        return TokenPrompt(token_ids, segments, tuple(pictures.values()))

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text, add_special_tokens):
                self._check_length(text, max_tokens, "prompt")
                return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
            case PairPrompt(first, second):
                self._check_length(first + second, max_tokens, "input")
                return self._tokenizer.encode_text(first, second).token_ids
            case ChatPrompt():
                text = self._render(prompt)
                self._check_length(text, max_tokens, "messages")
                return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, prompt: ChatPrompt) -> str:
        has_parts = self.images is not None and self._tokenizer.takes_parts
        messages = [
            {
                "role": message.role,
                "content": template_content(message.content) if has_parts else message.text,
                **message.others,
            }
            for message in prompt.messages
        ]
        return self._tokenizer.render_chat(
            messages,
            add_generation_prompt=prompt.add_generation_prompt,
            variables=prompt.variables,
        )

    def encode_text(
        self, prompt: Prompt, max_tokens: int | None, cut_at: int | None
    ) -> EncodedText:
        match prompt:
            case PairPrompt():
                texts: tuple[str, str | None] = prompt.first, prompt.second
            case TextPrompt(add_special_tokens=True):
                texts = prompt.text, None
            case _:
                return super().encode_text(prompt, max_tokens, cut_at)
        for part in filter(None, texts):
            self._check_length(part, None if cut_at else max_tokens, "input")
        # A token has at most so many characters: the rest of a long text would be cut anyway.
        end = None if cut_at is None else cut_at * self._tokenizer.max_token_chars
        first, second = (None if part is None else part[:end] for part in texts)
        return self._tokenizer.encode_text(first or "", second, cut_at)

    def check_own_tokens(self, token_ids: tuple[int, ...]) -> None:
        special = self._special_token_ids
        if len(special) > 1 and special[0] != token_ids[0]:
            raise InvalidRequest(
                f"the token ids begin with {token_ids[0]}, not with the model's special token "
                f"{special[0]}: they seem to be those of another tokenizer. Send texts (in "
                "LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or the ids of "
                "/tokenize",
                "input",
            )

    @cached_property
    def _special_token_ids(self) -> tuple[int, ...]:
        """Tokens that surround a text."""
        return self._tokenizer.encode_text("").token_ids

    def _check_length(self, text: str, max_tokens: int | None, field: str) -> None:
        if max_tokens is None:
            return
        max_characters = max_tokens * self._tokenizer.max_token_chars
        if len(text) > max_characters:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters; this model's maximum context length is "
                f"{max_tokens} tokens, which make at most {max_characters} characters: shorten it",
                field,
            )

    def encode_prediction(self, text: str, max_tokens: int | None) -> tuple[int, ...]:
        end = None if max_tokens is None else max_tokens * self._tokenizer.max_token_chars
        return tuple(self._tokenizer.encode(text[:end], add_special_tokens=False)[:max_tokens])

    def spellings(self, word: str) -> frozenset[tuple[int, ...]]:
        texts = (word, f" {word.lstrip()}")
        encoded = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return frozenset(filter(None, encoded))

    def text(self, token_ids: tuple[int, ...], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def end_of(self, token_ids: tuple[int, ...]) -> str:
        return self.text(token_ids[-NUM_END_TOKENS:], skip_special_tokens=False)

    @property
    def supports_tools(self) -> bool:
        return self._tokenizer.supports_tools

    def token(self, token_id: int) -> TokenText:
        return self._tokenizer.token(token_id)

    def create_detokenizer(self, shown: Collection[str] = ()) -> IncrementalDetokenizer:
        return self._tokenizer.detokenizer(shown=shown)


def placeholder_text(token_id: int) -> TokenText:
    """Return a placeholder text for a token that is not decoded."""
    name = f"token_id:{token_id}"
    return TokenText(name, name.encode())


def _no_tokenizer_error(model: str) -> UnsupportedInput:
    whose, folder = (f" for model {model!r}", f" {model}=FOLDER") if model else ("", "")
    return UnsupportedInput(
        f"this router has no tokenizer{whose}: send token ids, or give it --model{folder}"
    )
