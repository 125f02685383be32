"""Requests and answers of the router, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.media import MediaSegment, Picture
from baton.core.output import Finish, TokenLogprobs
from baton.core.request import GENERATE, Task
from baton.core.sampling import ReasoningSection, SamplingParams
from baton.core.stop_strings import StopRule
from baton.router.parts import Content, MessageFile, Part, text_of

TEMPLATE_CHARACTERS = 16  # that a chat template adds around each message, estimated
VALUE_CHARACTERS = 4  # of a number, or around a list, estimated
MAX_COUNTED_CHARACTERS = 1 << 14
PartKind = TypeVar("PartKind", bound=Part)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: Content
    others: Mapping[str, object] = field(default_factory=dict)  # other fields, for the template

    @property
    def text(self) -> str:
        return text_of(self.content)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True

    @property
    def num_characters(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    variables: Mapping[str, object] = field(default_factory=dict)  # of the template, such as tools

    @property
    def has_parts(self) -> bool:
        """True if a message has more than a text."""
        return any(not isinstance(message.content, str) for message in self.messages)

    @property
    def files(self) -> list[MessageFile]:
        """Files that are not read yet."""
        return [part for part in self._parts() if isinstance(part, MessageFile)]

    def parts(self, kind: type[PartKind]) -> list[PartKind]:
        return [part for part in self._parts() if isinstance(part, kind)]

    def replaced(self, kind: type[Part], parts: Sequence[Part | tuple[Part, ...]]) -> ChatPrompt:
        """Return the chat with each part of a kind replaced by another one, or by several."""
        rest = iter(parts)

        def read(part: Part) -> tuple[Part, ...]:
            found = next(rest) if isinstance(part, kind) else part
            return found if isinstance(found, tuple) else (found,)

        messages = [
            each
            if isinstance(each.content, str)
            else replace(each, content=tuple(new for part in each.content for new in read(part)))
            for each in self.messages
        ]
        return replace(self, messages=tuple(messages))

    def _parts(self) -> Iterator[Part]:
        for message in self.messages:
            yield from () if isinstance(message.content, str) else message.content

    @property
    def num_characters(self) -> int:
        """Estimated length of the rendered template, of which variables count up to a limit."""
        num_in_messages = sum(len(message.role) + len(message.text) for message in self.messages)
        mappings = [self.variables, *(message.others for message in self.messages)]
        num_in_mappings = 0
        for length in lengths_in([mapping for mapping in mappings if mapping]):
            num_in_mappings += length
            if num_in_mappings > MAX_COUNTED_CHARACTERS:
                break
        return num_in_messages + num_in_mappings + TEMPLATE_CHARACTERS * len(self.messages)


def lengths_in(value: object) -> Iterator[int]:
    """Yield the lengths of the texts in a JSON value, and estimates for all else."""
    if isinstance(value, str):
        yield len(value)
        return
    yield VALUE_CHARACTERS
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield len(str(name))
            yield from lengths_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from lengths_in(each)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]
    media: tuple[MediaSegment, ...] = ()
    pictures: tuple[Picture, ...] = ()  # of the media

    @property
    def num_characters(self) -> int:
        """0: there is no text to tokenise."""
        return 0


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts that a model scores together, such as a query and a document."""

    first: str
    second: str

    @property
    def num_characters(self) -> int:
        return len(self.first) + len(self.second)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks around the reasoning, which begins an answer, or which the prompt has begun."""

    begin: str
    end: str
    is_always_open: bool = False  # the model reasons, even if the prompt does not show it
    next_tags: tuple[str, ...] = ()  # that end a reasoning without its end mark
    tool_format: str = ""  # whose script parses the reasoning, too

    @property
    def texts(self) -> tuple[str, str]:
        return self.begin, self.end

    def is_closed_after(self, prompt_end: str) -> bool:
        """Return whether a prompt that ends so has ended the reasoning."""
        return prompt_end.rstrip().endswith(self.end.rstrip())

    def is_open_after(self, prompt_end: str) -> bool:
        """Return whether an answer begins inside the reasoning, after a prompt that ends so."""
        if self.is_closed_after(prompt_end):
            return False
        return self.is_always_open or prompt_end.rstrip().endswith(self.begin.rstrip())


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """Tokens of a model's reasoning marks, if structured output can begin after them."""

    marks: ReasoningMarks
    begin_token_id: int
    end_token_ids: tuple[int, ...]

    def section_after(self, prompt_end: str) -> ReasoningSection | None:
        """Return the section of an answer to a prompt that ends so; None if it has ended one."""
        if self.marks.is_closed_after(prompt_end):
            return None
        is_open = self.marks.is_open_after(prompt_end)
        return ReasoningSection(self.end_token_ids, None if is_open else self.begin_token_id)


@dataclass(frozen=True, slots=True)
class Parsing:
    """Names of the formats of a model's answers; empty: all text is content."""

    tools: str = ""
    reasoning: str = ""
    reasoning_tokens: ReasoningTokens | None = None  # None: structured output has no reasoning


NO_PARSING = Parsing()
Prompt = TextPrompt | ChatPrompt | TokenPrompt | PairPrompt


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation request with one answer."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    task: Task = GENERATE
    stop: StopRule = StopRule()
    model: ModelVariant = ANY_MODEL
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""  # owner of the salt; empty: the client is not known
    client: str = ""  # opaque; clients share nodes and places in the queue equally
    kv_hints: KvHints = NO_KV_HINTS
    prediction: str = ""  # text that the answer is likely to repeat; empty once it is tokenised
    predicted_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()  # texts that the answer must not contain
    shown_tokens: tuple[str, ...] = ()  # special tokens to include in the text
    reasoning: ReasoningTokens | None = None  # in front of the structured output
    # The client set no max_tokens: the answer is limited only by the model's context length and
    # the KV caches, less the prompt.
    fills_context: bool = False
    max_prompt_tokens: int | None = None  # a longer prompt is cut; None: it is refused
    foreign_kv: ForeignKv | None = None  # of the prompt, on a vLLM server
    warnings: tuple[str, ...] = ()  # what is done only in part

    @property
    def token_prompt(self) -> TokenPrompt:
        """Prompt that has been tokenised."""
        if not isinstance(self.prompt, TokenPrompt):
            raise TypeError(f"request {self.request_id!r} has not been tokenised")
        return self.prompt

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.token_prompt.token_ids


class TokenChunk(NamedTuple):
    """Part of an answer. A tuple because one is created per token."""

    first_index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    vector: bytes = b""  # of a pooled prompt, see Output
    prompt_end: str = ""  # last text of the prompt, in the first part, for parsers of the answer


AnswerPart = TokenChunk | Finish  # a Finish is the last part
