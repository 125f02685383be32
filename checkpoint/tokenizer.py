"""Tokenizer, chat templates and incremental detokenizer of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import NamedTuple

import jinja2
import jinja2.meta
from tokenizers import Tokenizer as FastTokenizer

from baton.checkpoint.template_environment import TemplateEnvironment
from baton.core.errors import InvalidRequest, ModelError

MAX_CACHED_TOKENS = 1 << 16  # entries of each token text cache
MAX_CHARACTER_TOKENS = 8  # twice the bytes of a character
# Roles of OpenAI's API. Others are accepted if the chat template names them.
ROLES = ("assistant", "developer", "function", "system", "tool", "user")
# Errors of templates that get other messages than they expect, or too deeply nested ones.
TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError),
    *(AttributeError, AssertionError, RuntimeError),
)
# Errors of templates that Python does not compile, such as 21 nested loops.
BROKEN_TEMPLATES = (jinja2.TemplateSyntaxError, SyntaxError, MemoryError)

Message = Mapping[str, object]  # role, content and further variables of the template
Clock = Callable[[], datetime]
FIELD = "truncate_prompt_tokens"
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes it
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character


class Tokenizer:
    """Tokenizer and chat templates of one model. Thread-safe: only its caches change."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        named_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        eos_token_ids: tuple[int, ...] = (),
        clock: Clock = datetime.now,
    ) -> None:
        self._fast = fast
        self._named_tokens = dict(named_tokens)
        self._chat_templates = dict(chat_templates)
        self._clock = clock
        self.eos_token_ids = eos_token_ids
        self._compile = lru_cache(self._compile_uncached)
        # Text of a single token, cached: every answer needs it.
        self.decode_one = lru_cache(MAX_CACHED_TOKENS)(self._decode_one)
        # Text and bytes of a single token, special ones by name; cached.
        self.token = lru_cache(MAX_CACHED_TOKENS)(self._token)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer; the model's vocabulary may be padded beyond it."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token in characters."""
        return max(map(len, self._fast.get_vocab(with_added_tokens=True)))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    @cached_property
    def supports_tools(self) -> bool:
        """True if the chat template used with tools refers to `tools`."""
        try:
            parsed = self._environment.parse(self._template_source(has_tools=True))
        except (InvalidRequest, RecursionError, *BROKEN_TEMPLATES):
            return False
        return "tools" in jinja2.meta.find_undeclared_variables(parsed)

    @property
    def chat_template(self) -> str:
        """Source of the chat templates, all of them; empty without one."""
        return "\n".join(self._chat_templates.values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_mark(self, mark: str) -> tuple[int, ...]:
        """Return the tokens of a mark; none if it can be written with other tokens, too."""
        token_ids = tuple(self.encode(mark, add_special_tokens=False))
        return token_ids if token_ids and token_ids[0] in self._added_ids else ()

    def encode_text(
        self, text: str, second: str | None = None, max_tokens: int | None = None
    ) -> EncodedText:
        """Encode a text, or a pair of texts, for an embedder or a reranker."""
        return encode_text(self._fast, text, second, max_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _decode_one(self, token_id: int, skip_special_tokens: bool) -> str:
        return self.decode((token_id,), skip_special_tokens=skip_special_tokens)

    def _token(self, token_id: int) -> TokenText:
        text = self.decode_one(token_id, False)
        name = self._fast.id_to_token(token_id)
        if name is None or token_id in self._added_ids:
            return TokenText(text, text.encode())
        return spelled(name, text)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render the chat template.

        `variables` are passed to the template unchanged; with `tools` among them, the model's
        template for tools is used, if it has one. Raises InvalidRequest if the model has no
        template, if neither OpenAI nor the template knows a role, or if the template raises an
        error.
        """
        extra = dict(variables or {})
        self._check_roles(messages)
        try:
            source = self._template_source(has_tools=bool(extra.get("tools")))
            values = {
                **self._named_tokens,
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "tools": None,
                "documents": None,
                **extra,
            }
            return self._environment.render(self._compile(source), values)
        except BROKEN_TEMPLATES as error:
            raise ModelError(f"the model's chat template is broken: {error}") from error
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error

    def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, object] | None = None
    ) -> list[int]:
        """Return the tokens of a chat, up to where its answer begins. Raises as `render_chat`."""
        text = self.render_chat(messages, variables=variables)
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def takes_parts(self) -> bool:
        """True if the chat template takes a message's content as a list of parts."""
        text = "a text to find"
        parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        try:
            found = self.render_chat(parts)
        except InvalidRequest:
            return False
        return text in found and "'type'" not in found

    def _compile_uncached(self, source: str) -> jinja2.Template:
        return self._environment.from_string(source)

    def is_byte(self, token_id: int) -> bool:
        """Return whether the token is a byte-fallback token, such as `<0x0A>`."""
        return token_id in self._byte_ids

    def detokenizer(self, shown: Collection[str] = ()) -> Detokenizer:
        """Return a detokenizer of one answer. Special tokens named in `shown` are not skipped."""
        kept = self._special_ids & {self._fast.token_to_id(name) for name in shown}
        return Detokenizer(self, self._special_ids - kept if kept else None)

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            role = message.get("role")
            if role not in ROLES and role not in self._template_words:
                field = f"messages.{index}.role"
                raise InvalidRequest(
                    f"{field} is {role!r}: choose one of {', '.join(ROLES)}, or a role that the "
                    "model's chat template names",
                    field,
                )

    @cached_property
    def _template_words(self) -> frozenset[str]:
        """Texts in the chat templates' code, such as the roles that they distinguish."""
        words: set[str] = set()
        for source in self._chat_templates.values():
            try:
                constants = self._environment.parse(source).find_all(jinja2.nodes.Const)
            except (RecursionError, *BROKEN_TEMPLATES):
                continue  # reported when it is rendered
            words.update(node.value for node in constants if isinstance(node.value, str))
        return frozenset(words)

    def _template_source(self, *, has_tools: bool) -> str:
        names = ("tool_use", "default") if has_tools else ("default",)
        source = next((self._chat_templates[n] for n in names if n in self._chat_templates), None)
        if source is None:
            raise InvalidRequest("this model has no chat template: send text or token ids")
        return source

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._fast.get_added_tokens_decoder())

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._fast.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        ids = (self._fast.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def _environment(self) -> TemplateEnvironment:
        return TemplateEnvironment(self._clock)


class Detokenizer:
    """Incremental detokenizer of one sequence.

    The concatenated texts equal the text of the decoded sequence. Text is held back while it
    ends with an incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int] | None) -> None:
        """`hidden_ids`: tokens to skip, if those are not all special ones."""
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._skip_special_tokens = hidden_ids is None
        # Some decoders treat the start of a text differently, so new tokens are decoded together
        # with the last ones emitted: the first `_num_emitted` ids, with the text `_emitted_text`.
        self._window: list[int] = []
        self._num_emitted = 0
        self._emitted_text = ""
        self._next_length = 0  # of the window at which it is decoded, whatever its last token is

    def push(self, *token_ids: int) -> str:
        """Add tokens and return the text that they complete."""
        self._window.extend(token_ids)
        if not token_ids:
            return ""
        if self._tokenizer.is_byte(self._window[-1]):
            # Consecutive bytes are decoded together: an invalid byte invalidates its neighbours.
            return ""
        if len(self._window) < self._next_length and not self._ends_a_character():
            return ""
        text = self._decode(self._window)
        is_longer = len(text) > len(self._emitted_text)
        if not is_longer or text.endswith(UNFINISHED):
            # A run of tokens without a character is decoded ever more rarely: the whole takes
            # linear time.
            num_held = len(self._window) - self._num_emitted
            self._next_length = len(self._window) + 1 + num_held // MAX_CHARACTER_TOKENS
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """Return the text still held back, at the end of the sequence."""
        return self._emit(self._decode(self._window))

    def _ends_a_character(self) -> bool:
        text = self._decode(self._window[-1:])
        return bool(text) and not text.endswith(UNFINISHED)

    def _emit(self, text: str) -> str:
        completed = text[len(self._emitted_text) :]
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        self._emitted_text = self._decode(self._window)
        self._next_length = 0
        return completed

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._hidden_ids:
            token_ids = [item for item in token_ids if item not in self._hidden_ids]
        if len(token_ids) == 1:
            return self._tokenizer.decode_one(token_ids[0], self._skip_special_tokens)
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class EncodedText(NamedTuple):
    """Tokens of a text, or of a pair of texts, with special tokens."""

    token_ids: tuple[int, ...]
    second_start: int = 0  # index of the first token of type 1; 0: there is none
    is_cut: bool = False


def encode_text(
    fast: FastTokenizer, text: str, second: str | None = None, max_tokens: int | None = None
) -> EncodedText:
    """Encode a text or a pair, with at most `max_tokens`: the longer text is cut at its end.

    Raises InvalidRequest if not even the special tokens fit.
    """
    parts = [
        fast.encode(each, add_special_tokens=False) for each in (text, second) if each is not None
    ]
    is_cut = False
    if max_tokens is not None:
        num_special = fast.num_special_tokens_to_add(second is not None)
        if max_tokens <= num_special:
            raise InvalidRequest(
                f"{FIELD} is {max_tokens}; this model adds {num_special} special tokens: it must "
                "be more",
                FIELD,
            )
        lens = [len(part.ids) for part in parts]
        for part, num_kept in zip(parts, _fit(lens, max_tokens - num_special), strict=True):
            part.truncate(num_kept)
        is_cut = sum(lens) > max_tokens - num_special
    encoded = fast.post_process(parts[0], parts[1] if len(parts) > 1 else None)
    types = encoded.type_ids
    return EncodedText(tuple(encoded.ids), types.index(1) if 1 in types else 0, is_cut)


def _fit(lens: list[int], limit: int) -> list[int]:
    """Shorten the longest text first, until the sum of the lengths is within the limit."""
    if len(lens) == 1 or sum(lens) <= limit:
        return [min(lens[0], limit), *lens[1:]]
    shorter = min(*lens, limit // 2)
    rest = limit - shorter
    return [shorter, rest] if lens[0] < lens[1] else [rest, shorter]


class TokenText(NamedTuple):
    """Text and bytes of a single token, which may be part of a character. Pure."""

    text: str
    raw: bytes  # concatenated over several tokens, the UTF-8 text of all


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: bytes without a visible character map to code points from 256."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in visible)
    remapped = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in visible}, **remapped}


BYTE_OF_CHARACTER = _byte_of_character()


def spelled(name: str, text: str) -> TokenText:
    """Return text and bytes of a vocabulary entry `name` that alone decodes to `text`."""
    byte_token = BYTE_TOKEN.fullmatch(name)
    if byte_token is not None:
        return TokenText(text, bytes([int(byte_token[1], 16)]))
    if UNFINISHED in text and all(character in BYTE_OF_CHARACTER for character in name):
        return TokenText(text, bytes(BYTE_OF_CHARACTER[character] for character in name))
    if SPACE in name:
        text = name.replace(SPACE, " ")  # decoders strip the leading space of a text
    return TokenText(text, text.encode())
