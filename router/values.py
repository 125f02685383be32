"""Requests and answers of the router, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.logprobs import TokenLogprobs
from baton.core.output import FinishReason
from baton.core.sampling import SamplingParams
from baton.core.stop_strings import StopRule
from baton.core.task import Task, task_of
from baton.rpc.messages.calls import CallReport

TEMPLATE_CHARACTERS = 16  # that a chat template adds around each message, estimated


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    others: Mapping[str, object] = field(default_factory=dict)  # other fields, for the template


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
    def num_characters(self) -> int:
        """Estimated length of the rendered template."""
        num_in_messages = sum(len(message.role) + len(message.content) for message in self.messages)
        mappings = [self.variables, *(message.others for message in self.messages)]
        num_in_mappings = sum(len(str(mapping)) for mapping in mappings if mapping)
        return num_in_messages + num_in_mappings + TEMPLATE_CHARACTERS * len(self.messages)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]

    @property
    def num_characters(self) -> int:
        """0: there is no text to tokenise."""
        return 0


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation request with one answer."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    stop: StopRule = StopRule()
    model: ModelVariant = ANY_MODEL
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""  # owner of the salt; empty: the client is not known
    kv_hints: KvHints = NO_KV_HINTS
    bad_words: tuple[str, ...] = ()  # texts that the answer must not contain
    shown_tokens: tuple[str, ...] = ()  # special tokens to include in the text
    # The client set no max_tokens: the answer is limited only by the model's context length and
    # the KV caches, less the prompt.
    fills_context: bool = False
    warnings: tuple[str, ...] = ()  # what is done only in part

    @property
    def task(self) -> Task:
        return task_of(self.kv_hints)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of a prompt that has been tokenised."""
        if not isinstance(self.prompt, TokenPrompt):
            raise TypeError(f"request {self.request_id!r} has not been tokenised")
        return self.prompt.token_ids


class TokenChunk(NamedTuple):
    """Part of an answer. A tuple because one is created per token."""

    first_index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishStatus:
    """Finish reason of an answer."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


class PrefillPlace(Enum):
    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Nodes that served a request, and their statistics."""

    prefill_node: str
    decode_node: str
    prefill: PrefillPlace
    prefill_reason: str  # for local prefill; else empty
    decode_report: CallReport
    attempts: int
    trace_id: str = ""  # empty: not traced
    prefill_report: CallReport | None = None  # None: no prefill node, or it reported too late

    @property
    def num_cached_on_prefill(self) -> int | None:
        return None if self.prefill_report is None else self.prefill_report.prompt_tokens_cached

    @property
    def num_cached_prompt_tokens(self) -> int | None:
        """Prompt tokens read from the prefix cache of the node that computed the prompt."""
        if self.prefill is PrefillPlace.LOCAL:
            return self.decode_report.prompt_tokens_cached
        return self.num_cached_on_prefill

    @property
    def prompt_tokens_loaded(self) -> Mapping[str, int]:
        """Prompt tokens that the node which computed the prompt loaded, by tier."""
        if self.prefill is PrefillPlace.LOCAL:
            return self.decode_report.prompt_tokens_loaded
        return {} if self.prefill_report is None else self.prefill_report.prompt_tokens_loaded


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was received. None: it did not happen."""

    dispatched_s: float
    first_token_s: float | None
    first_decoded_token_s: float | None
    finished_s: float


@dataclass(frozen=True, slots=True)
class CompletionSummary:
    """Last part of an answer that completed: finish reason, usage and timings."""

    finish: FinishStatus
    num_prompt_tokens: int
    num_completion_tokens: int
    timings: Timings
    served: ServedBy
    warnings: tuple[str, ...] = ()  # what was done only in part


AnswerPart = TokenChunk | CompletionSummary
