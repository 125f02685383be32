"""Text boundary of the pipeline: prompts to token ids and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

from baton.checkpoint.tokenizer import EncodedText, Tokenizer, TokenText
from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.fair_queue import FairQueue
from baton.router.answer import IncrementalDetokenizer, NoDetokenizer
from baton.router.fair_slots import FairSlots
from baton.router.parts import template_content
from baton.router.pictures.plan import PictureFormat, PreparedImage, put_texts, segments_in
from baton.router.values import (
    ChatPrompt,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from baton.rpc.errors import UnsupportedInput

NUM_END_TOKENS = 16  # of a prompt: more than a chat template adds at its end
Result = TypeVar("Result")


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
        images = prompt.parts(PreparedImage) if isinstance(prompt, ChatPrompt) else []
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


@dataclass(frozen=True, slots=True)
class LargeTextConfig:
    small_size: int = 2048  # characters or tokens that are faster to process without a thread
    num_threads: int = 2
    max_waiting: int = 64  # limited because each holds its text in memory


class LargeTexts:
    """Tokenises large texts on a few threads, and small ones in turns, so that no turn is long."""

    def __init__(self, config: LargeTextConfig = LargeTextConfig()) -> None:
        self._config = config
        self._turns = LoopTurns(config.small_size)
        self._threads = FairSlots(config.num_threads, config.max_waiting, what="large texts")

    async def run(self, size: int, work: Callable[[], Result], client: str = "") -> Result:
        """Run `work`, on a thread if `size` is large. Raises QueueFull if too many wait.

        Clients take turns, by names of `turn_name`.
        """
        if size <= self._config.small_size:
            return await self.run_in_turn(size, work, client)
        await self._threads.acquire(client)
        result = asyncio.get_running_loop().run_in_executor(None, work)
        result.add_done_callback(partial(self._release_thread, client))
        # A cancelled request ends at once, but its thread is busy until `work` returns.
        return await asyncio.shield(result)

    async def run_in_turn(self, size: int, work: Callable[[], Result], client: str) -> Result:
        """Run `work`, whose time is limited, in a turn of the event loop that has room for it."""
        await self._turns.enter(size, client)
        return work()

    def _release_thread(self, client: str, result: asyncio.Future[Result]) -> None:
        self._threads.release(client)
        if not result.cancelled():
            result.exception()  # mark as retrieved, in case the request was cancelled


class _Work(NamedTuple):
    size: int
    came: asyncio.Future[None]


class LoopTurns:
    """Limits the size of the works that run in one turn of the event loop. Clients take turns."""

    def __init__(self, max_size: int) -> None:
        """A turn has room for one more work while those in it are smaller than `max_size`."""
        self._max_size = max_size
        self._num_left = max_size
        self._waiting = FairQueue[str, _Work]()
        self._loop: asyncio.AbstractEventLoop | None = None  # that will call `_begin_turn`

    async def enter(self, size: int, client: str) -> None:
        """Return in a turn that has room for a work of this size, which must begin at once."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._begin_turn)
        if self._num_left > 0:
            self._num_left -= size
            return
        work = _Work(size, loop.create_future())
        self._waiting.add(client, work)
        await work.came

    def _begin_turn(self) -> None:
        is_idle = self._num_left == self._max_size
        self._num_left = self._max_size
        while self._num_left > 0 and (work := self._waiting.take()) is not None:
            if not work.came.done():  # else it was cancelled
                self._num_left -= work.size
                work.came.set_result(None)
        if is_idle or self._loop is None:
            self._loop = None
        else:
            self._loop.call_soon(self._begin_turn)
