"""What the router takes and gives, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from baton.stops import StopRule
from engine.request import FinishReason
from engine.sampling import SamplingParams
from kv_transfer.types import TokenLogprobs

CHARACTERS_AROUND = 16  # each message of a chat, by its template


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    others: Mapping[str, object] = field(default_factory=dict)  # for the template, as they came


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
    variables: Mapping[str, object] = field(default_factory=dict)  # of the template; tools, too

    @property
    def num_characters(self) -> int:
        """About as many as the template makes of it."""
        said = sum(len(one.role) + len(one.content) for one in self.messages)
        others = [self.variables, *(one.others for one in self.messages)]
        written = sum(len(str(each)) for each in others if each)
        return said + written + CHARACTERS_AROUND * len(self.messages)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]

    @property
    def num_characters(self) -> int:
        """There is nothing to tokenise."""
        return 0


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Call:
    """One Generate call."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    stop: StopRule = StopRule()
    model: str = ""  # empty: whichever is served
    priority: int = 0
    cache_salt: str = ""
    bad_words: tuple[str, ...] = ()  # texts that it must not hold
    shown_tokens: tuple[str, ...] = ()  # special tokens that its text shall show
    # max_tokens was left out: the answer may take what the prompt leaves of the model's length
    # and of the KV caches.
    fills_context: bool = False


class Piece(NamedTuple):
    """The next part of an answer. A tuple, because one is made per token."""

    first_index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer ended."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


class PrefillPlace(Enum):
    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class DecodeSummary:
    """What an answer took on its decode node, as that node tells it."""

    kv_bytes: int = 0
    kv_blocks: int = 0
    kv_transport: str = ""
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_proposed: int = 0
    tokens_accepted: int = 0


@dataclass(frozen=True, slots=True)
class PrefillSummary:
    """Prompt accounting of a prefill node."""

    prompt_tokens_cached: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """Who did the work."""

    prefill_node: str
    decode_node: str
    prefill: PrefillPlace
    prefill_reason: str  # why it was local, if it was
    summary: DecodeSummary
    attempts: int
    trace_id: str = ""  # empty: not traced
    prefill_summary: PrefillSummary | None = None  # None: no prefill node, or it was too late

    @property
    def num_cached_on_prefill(self) -> int | None:
        return None if self.prefill_summary is None else self.prefill_summary.prompt_tokens_cached

    @property
    def num_cached_prompt_tokens(self) -> int | None:
        """Prompt tokens read from the prefix cache of the node that computed the others."""
        if self.prefill is PrefillPlace.LOCAL:
            return self.summary.prompt_tokens_cached
        return self.num_cached_on_prefill


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was received; None for what did not happen."""

    dispatched_s: float
    first_token_s: float | None
    first_decoded_token_s: float | None
    finished_s: float


@dataclass(frozen=True, slots=True)
class Ending:
    """The last thing told of a request that did not fail."""

    finish: Finish
    num_prompt_tokens: int
    num_completion_tokens: int
    timings: Timings
    served: Served
