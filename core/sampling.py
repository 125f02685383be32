"""Sampling parameters of a request, validated on construction, and its reasoning section."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 64
MAX_BANNED_SEQUENCES = 1024
MAX_BANNED_SEQUENCE_TOKENS = 1 << 16  # of all of them together
MAX_STOP_TOKEN_IDS = 1 << 10
MAX_LOGIT_BIASES = 1 << 14
MAX_TOKEN_ID = (1 << 31) - 1  # the node protocol has 32 bits
MAX_LISTED_TOKEN_IDS = 1 << 18  # allowed or banned; the size of the largest vocabularies

# Argument of a logits processor: a JSON scalar or a list of them.
Scalar: TypeAlias = str | int | float | bool
Argument: TypeAlias = Scalar | tuple[Scalar, ...]
FIELD = "reasoning"
MAX_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Names and meanings follow vLLM and the OpenAI API."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    # The last token of a sequence is never sampled after the others.
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn at random on arrival
    logprobs: int | None = None  # number of top tokens; 0: the sampled token only
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None  # constrains the output
    reasoning: ReasoningSection | None = None  # in front of the structured output
    extra_args: Mapping[str, Argument] = field(default_factory=dict)  # for logits processors

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def __post_init__(self) -> None:
        self._check_limits()
        self._check_shape_of_distribution()
        self._check_penalties()
        self._check_token_ids()
        self._check_form()

    # NaN fails every comparison, so it is refused, too.

    def _check_limits(self) -> None:
        if not self.max_tokens >= 1:
            raise _invalid("max_tokens", self.max_tokens, "at least 1")
        if not self.min_tokens >= 0:
            raise _invalid("min_tokens", self.min_tokens, "at least 0")
        if not self.min_tokens <= self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise _invalid(name, count, f"from 0 to {MAX_LOGPROBS}, or left out")

    def _check_shape_of_distribution(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise _invalid("temperature", self.temperature, "from 0 to 100")
        if not 0 < self.top_p <= 1:
            raise _invalid("top_p", self.top_p, "above 0 and at most 1")
        if not self.top_k >= 0:
            raise _invalid("top_k", self.top_k, "at least 0 (0 keeps all tokens)")
        if not 0 <= self.min_p <= 1:
            raise _invalid("min_p", self.min_p, "from 0 to 1")

    def _check_penalties(self) -> None:
        if not 0 < self.repetition_penalty < math.inf:
            raise _invalid("repetition_penalty", self.repetition_penalty, "above 0 and finite")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            if not -2 <= penalty <= 2:
                raise _invalid(name, penalty, "from -2 to 2")
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES)
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise _invalid(f"logit_bias[{token_id}]", bias, "from -100 to 100")

    def _check_token_ids(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty: leave it out to allow every token", "allowed_token_ids"
            )
        self._check_banned_sequences()
        allowed = self.allowed_token_ids or ()
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_count("banned_token_ids", len(self.banned_token_ids), MAX_LISTED_TOKEN_IDS)
        _check_count("allowed_token_ids", len(allowed), MAX_LISTED_TOKEN_IDS)
        banned = chain(self.banned_token_ids, chain.from_iterable(self.banned_sequences))
        section = () if self.reasoning is None else self.reasoning.token_ids
        listed = chain(self.stop_token_ids, banned, allowed, self.logit_bias, section)
        lowest = min(listed, default=0)
        if lowest < 0:
            raise _invalid("token id", lowest, "at least 0")

    def _check_banned_sequences(self) -> None:
        """Check the limits, which exist because every sequence is compared at every token."""
        name, count = "banned_sequences", len(self.banned_sequences)
        if not all(self.banned_sequences):
            raise InvalidRequest(f"{name}: one of them is empty", name)
        if count > MAX_BANNED_SEQUENCES:
            raise InvalidRequest(
                f"{name} has {count}; at most {MAX_BANNED_SEQUENCES} are allowed", name
            )
        _check_count(name, sum(map(len, self.banned_sequences)), MAX_BANNED_SEQUENCE_TOKENS)

    @property
    def has_penalty(self) -> bool:
        has_added = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return has_added or self.repetition_penalty != 1.0

    @property
    def edits_logits(self) -> bool:
        """True if logits are changed before each token is chosen."""
        return bool(
            self.allowed_token_ids is not None
            or self.banned_token_ids
            or self.banned_sequences
            or self.logit_bias
            or self.has_penalty
            or self.extra_args
        )

    @property
    def takes_peaks(self) -> bool:
        """True if each token is that of the model's largest logit."""
        return self.is_greedy and not (self.edits_logits or self.min_tokens)

    @property
    def size(self) -> int:
        """Approximate cost of copying the lists and maps; a token id in a list costs 1."""
        lists = (self.stop_token_ids, self.banned_token_ids, self.allowed_token_ids or ())
        num_ids = sum(map(len, (*lists, *self.banned_sequences)))
        num_arguments = sum(
            len(value) if isinstance(value, tuple) else 1 for value in self.extra_args.values()
        )
        return num_ids + 4 * len(self.logit_bias) + 8 * (len(self.banned_sequences) + num_arguments)

    def _check_form(self) -> None:
        if self.reasoning is not None and self.structured_outputs is None:
            raise InvalidRequest(
                "reasoning needs structured_outputs, which begin after it: leave it out",
                "reasoning",
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos and structured_outputs exclude each other: a complete answer cannot "
                "continue without violating its form",
                "ignore_eos",
            )


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Default sampling parameters of a model, from its files; None: not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float | int]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}

    def params(self, **chosen: Any) -> SamplingParams:
        """Build parameters from `chosen` and, for the rest, the defaults. Raises InvalidRequest."""
        return SamplingParams(**{**self.given, **chosen})


NO_SAMPLING_DEFAULTS = SamplingDefaults()


def fit_max_tokens(
    sampling: SamplingParams, num_prompt_tokens: int, max_sequence_len: int
) -> tuple[SamplingParams, str]:
    """Lower `max_tokens` to the rest of a sequence of at most `max_sequence_len` tokens.

    Returns a warning if it was lowered. A prompt without any rest is left to `validate_request`.
    Raises InvalidRequest if `min_tokens` exceeds the rest.
    """
    rest = max_sequence_len - num_prompt_tokens
    if rest < 1 or sampling.max_tokens <= rest:
        return sampling, ""
    reason = (
        f"prompt and answer can have {max_sequence_len} tokens together, and the prompt has "
        f"{num_prompt_tokens}"
    )
    if sampling.min_tokens > rest:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}: {reason}; lower it to at most {rest}, or "
            "shorten the prompt",
            "min_tokens",
        )
    warning = f"max_tokens {sampling.max_tokens} was lowered to {rest}: {reason}"
    return replace(sampling, max_tokens=rest), warning


def read_logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """Return biases by token id, for those whose keys are texts. Raises InvalidRequest."""
    return {_token_id(name): bias for name, bias in biases.items()}


def _token_id(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_TOKEN_ID))
    if not is_number or int(text) > MAX_TOKEN_ID:
        raise InvalidRequest(f"logit_bias: {text[:32]!r} is no token id", "logit_bias")
    return int(text)


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} token ids; at most {limit} are allowed", name)


def _invalid(name: str, value: object, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value}; it must be {expected}", name.partition("[")[0])


@dataclass(frozen=True, slots=True)
class ReasoningSection:
    """Structured output begins after `end_token_ids`. Until then, any text may be generated."""

    end_token_ids: tuple[int, ...]
    # First token of an answer with reasoning: any other begins the structured output. None: the
    # prompt has begun the reasoning.
    begin_token_id: int | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.end_token_ids) <= MAX_END_TOKENS:
            raise InvalidRequest(
                f"{FIELD}.end_token_ids must have 1 to {MAX_END_TOKENS} tokens; it has "
                f"{len(self.end_token_ids)}",
                FIELD,
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        begin = () if self.begin_token_id is None else (self.begin_token_id,)
        return (*begin, *self.end_token_ids)
