"""Pydantic models of OpenAI's request bodies, with vLLM's fields. Pure.

Unknown fields and wrong types are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.core.errors import InvalidRequest
from baton.core.sampling import MAX_LISTED_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from baton.router.input_processing.limits import (
    MAX_CHAT_MESSAGES,
    MAX_TOKENS_TO_DETOKENIZE,
    MAX_TOOLS,
    check_count,
)
from baton.rpc.errors import UnsupportedInput

MAX_INT32 = (1 << 31) - 1  # integers of the node protocol have 32 bits
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
Texts = Annotated[list[str], Field(max_length=1 << 10, fail_fast=True)]
MAX_FIELDS = 1 << 14  # of the body, and of each object directly in it
AnyInt = Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)]
StopIds = Annotated[list[Count], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedIds = Annotated[list[Count], Field(max_length=MAX_LISTED_TOKEN_IDS, fail_fast=True)]
Messages = Annotated[list[dict[str, Any]], Field(max_length=MAX_CHAT_MESSAGES, fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]

# Accepted and ignored: these fields do not affect the answer.
IGNORED_FIELDS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        "verbosity",
    }
)
# Fields without support, and the values that are accepted because they match the behaviour.
ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "modalities": (["text"],),
    "continue_final_message": (False,),
    "add_special_tokens": (),  # supported for text prompts only
}
NONE_ACCEPTED: Mapping[str, tuple[object, ...]] = {}
NO_REASONS: Mapping[str, str] = {}
# Seconds for which KV is kept, as hints, by the values of fields.
RETENTION_S = {"in_memory": 0, "24h": 86_400}
TTL_S = {"30m": 1_800, "12h": 43_200}


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class KvHintsBody(Body):
    session_id: str = ""
    retain_s: float = 0.0
    priority: AnyInt | None = None
    release: bool = False
    prefetch: bool = False


class PromptCacheOptions(Body):
    """Options of chats and Responses. Every prefix is cached, also without them."""

    mode: Literal["implicit", "explicit"] | None = None  # ignored
    ttl: Literal["30m", "12h"] | None = None
    prewarm: Literal[False] = False
    comparison_response_id: str | None = None  # ignored


class Prediction(Body):
    """Text that the answer is likely to repeat."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """Raises UnsupportedInput for a part that is no text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(map(_text_of_part, self.content))


class GenerationBody(Body):
    """Fields common to completions and chats. None: not given."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: AnyInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = Field(default_factory=dict)
    seed: Seed | None = None
    stop: str | Texts = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    stop_token_ids: StopIds = Field(default_factory=list)
    allowed_token_ids: AllowedIds | None = None
    bad_words: Texts = Field(default_factory=list)
    vllm_xargs: dict[str, Any] = Field(default_factory=dict)
    ignore_eos: bool = False
    prompt_logprobs: Count | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    priority: AnyInt = 0
    cache_salt: str = ""
    kv_hints: KvHintsBody = KvHintsBody()
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def retain_s(self) -> float:
        """Time for which the KV is to be kept, unless hints say otherwise."""
        return 0.0


class CompletionBody(GenerationBody):
    prompt: Any = None
    prompt_embeds: Any = None  # instead of prompt
    echo: bool = False
    logprobs: Count | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class TemplateFields(Body):
    """Fields of a chat's prompt besides its messages."""

    add_generation_prompt: bool = True
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None  # passed to the chat template, as in vLLM


class ChatOptions(GenerationBody, TemplateFields):
    """Fields of a chat besides its messages."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    prompt_cache_options: PromptCacheOptions = PromptCacheOptions()
    prompt_cache_retention: Literal["in_memory", "24h"] = "in_memory"
    prediction: Prediction | None = None

    @property
    def retain_s(self) -> float:
        ttl = self.prompt_cache_options.ttl
        return max(RETENTION_S[self.prompt_cache_retention], 0 if ttl is None else TTL_S[ttl])


class ChatBody(ChatOptions):
    messages: Messages


class TokenizeTextBody(Body):
    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(TemplateFields):
    messages: Messages
    model: str = ""
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str = ""
    tokens: Annotated[list[Count], Field(max_length=MAX_TOKENS_TO_DETOKENIZE, fail_fast=True)]


class ResetBody(Body):
    tiers: Texts = Field(default_factory=list)  # empty: all
    reset_running: bool = False


B = TypeVar("B", bound=Body)


def _text_of_part(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise UnsupportedInput(
            "prediction.content has a part that is no text: send parts of type text",
            "prediction.content",
        )
    return text


def with_session(fields: dict[str, Any], session_id: str) -> dict[str, Any]:
    """Add the session id of the header, unless the body has one."""
    hints = fields.get("kv_hints", {})
    if not session_id or not isinstance(hints, dict):
        return fields
    return {**fields, "kv_hints": {"session_id": session_id, **hints}}


def openai_body(fields: Mapping[str, Any], kind: type[B]) -> B:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    accepted = {name: ACCEPTED_VALUES[name] for name in ACCEPTED_VALUES.keys() - kind.model_fields}
    return validate_body(effective_fields(fields, IGNORED_FIELDS, accepted), kind)


def effective_fields(
    fields: Mapping[str, Any],
    ignored: Collection[str],
    accepted: Mapping[str, tuple[object, ...]] = NONE_ACCEPTED,
) -> dict[str, Any]:
    """Return the fields without those that are ignored or null, or have `accepted` values.

    Raises UnsupportedInput for other values, and InvalidRequest if a body, or an object directly
    in it, has too many fields.
    """
    check_count("body", len(fields), MAX_FIELDS)
    for name, value in fields.items():
        if isinstance(value, dict):
            check_count(name, len(value), MAX_FIELDS)
    effective = {
        name: value for name, value in fields.items() if value is not None and name not in ignored
    }
    for name in accepted.keys() & effective.keys():
        if effective.pop(name) not in accepted[name]:
            raise UnsupportedInput(f"{name} is not supported here: leave it out", name)
    return effective


def validate_body(fields: object, kind: type[B], where: str = "") -> B:
    """Validate a body, or the part of one at `where`. Raises InvalidRequest."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid_request(error, where) from error


def validate_by_type(
    value: object, kinds: Mapping[str, type[B]], where: str, reasons: Mapping[str, str] = NO_REASONS
) -> B:
    """Validate an object by its `type`. Raises InvalidRequest and UnsupportedInput.

    `reasons` say why some types are not supported.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type", where)
    if kind not in kinds:
        reason = reasons.get(kind, f"supported here: only {', '.join(kinds)}")
        raise UnsupportedInput(f"{where}.type is {kind[:64]!r}: {reason}", f"{where}.type")
    return validate_body(value, kinds[kind], where)


def _invalid_request(error: ValidationError, where: str) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(filter(None, (where, *(str(part) for part in first["loc"]))))
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{field} is not a known field: leave it out", field)
    if first["type"] == "missing":
        return InvalidRequest(f"{field} is missing", field)
    return InvalidRequest(f"{field}: {first['msg']}", field)
