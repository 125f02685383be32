"""Conversion of completion and chat requests to calls of the pipeline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.extra_args import parse_argument
from baton.core.foreign_kv import foreign_kv_from
from baton.core.ids import ANY_MODEL, ModelVariant
from baton.core.kv_hints import KvHints
from baton.core.request import task_of
from baton.core.sampling import SamplingDefaults, read_logit_bias
from baton.core.stop_strings import StopRule
from baton.router.answers import NUM_SEEDS, calls_for_answers
from baton.router.doors.openai.request.bodies import (
    MAX_INT32,
    ChatBody,
    ChatOptions,
    CompletionBody,
    GenerationBody,
    openai_body,
)
from baton.router.doors.openai.request.prompts import chat_from, messages_from, parse_prompts
from baton.router.doors.openai.request.structured_outputs import (
    TOOLS,
    OutputFormat,
    output_format_from,
)
from baton.router.doors.openai.request.tool_choice import ToolChoice, tool_choice_from
from baton.router.input_processing.limits import (
    MAX_ANSWERS,
    MAX_EXTRA_ARGS,
    check_count,
    check_name,
    check_texts,
    max_tokens_with_logprobs,
)
from baton.router.prompt_embeds import FIELD, prompt_of_embeds
from baton.router.text_events.parsing import PLAIN_TEXT, Constraint, TextFormat, ToolCallMode
from baton.router.values import NO_PARSING, ChatMessage, GenerateCall, Parsing, Prompt
from baton.rpc.errors import EmptyPrompt, UnsupportedInput

MAX_TOP_LOGPROBS = 20
MODEL_DEFAULTED_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty")
PLAIN = ("min_tokens", "presence_penalty", "frequency_penalty", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options of the response: what to include and how to format it."""

    is_chat: bool
    is_streamed: bool
    with_usage: bool = False  # in the last chunk of a stream
    with_usage_so_far: bool = False  # in each chunk of a stream
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    echoes: bool = False
    with_answer: bool = True  # False: return the prompt only
    with_token_ids: bool = False
    tokens_by_id: bool = False
    text_format: TextFormat = PLAIN_TEXT
    stop_token_ids: tuple[int, ...] = ()  # of the request, without the model's own
    form_field: str = ""  # the field that sets structured output; empty: none

    @property
    def needs_prompt_ids(self) -> bool:
        return self.echoes or self.with_token_ids or self.with_usage_so_far


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Parsed request: `num_each` consecutive calls per prompt.

    The answer contains the `num_returned` likeliest results of each prompt.
    """

    calls: tuple[GenerateCall, ...]
    num_each: int
    num_returned: int
    options: ResponseOptions


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Properties of the requested model that the router knows."""

    defaults: SamplingDefaults
    max_model_len: int | None  # None while no decode node is known
    parsing: Parsing = NO_PARSING
    variant: ModelVariant = ANY_MODEL
    # Of embeddings in place of tokens; 0: no node takes them, None: this router does not.
    prompt_embeds_size: int | None = None


def completion_from(
    fields: Mapping[str, Any], request_id: str, context: ModelContext
) -> ParsedRequest:
    """Parse a completion. Raises InvalidRequest, UnsupportedInput and EmptyPrompt."""
    body = openai_body(fields, CompletionBody)
    prompts = _prompts_from(body, context)
    best_of = _best_of(body)
    overrides: dict[str, Any] = {}
    if body.max_tokens is not None:
        overrides["max_tokens"] = 1 if _returns_prompt_only(body) else body.max_tokens
    if body.logprobs is not None:
        overrides["logprobs"] = body.logprobs
        if body.echo:
            overrides["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    elif best_of > body.n:
        overrides["logprobs"] = 0  # needed to rank the answers
    return _parsed_request(
        body,
        prompts,
        overrides,
        request_id,
        context,
        num_each=best_of,
        num_logprobs=body.logprobs,
        output_format=output_format_from(body),
    )


def _prompts_from(body: CompletionBody, context: ModelContext) -> Sequence[Prompt]:
    if body.prompt_embeds is None:
        return parse_prompts(
            body.prompt,
            add_special_tokens=body.add_special_tokens,
            max_model_len=context.max_model_len,
        )
    size = context.prompt_embeds_size
    if not size:
        what = "this router is" if size is None else "the model's prefill nodes are"
        raise UnsupportedInput(f"{FIELD} needs --enable-prompt-embeds, without which {what}", FIELD)
    if body.prompt:
        raise InvalidRequest(f"send either prompt or {FIELD}", FIELD)
    if body.echo or body.return_token_ids or body.prompt_logprobs is not None:
        raise UnsupportedInput(
            f"{FIELD} has no tokens for echo, return_token_ids or prompt_logprobs", FIELD
        )
    given = body.prompt_embeds if isinstance(body.prompt_embeds, list) else [body.prompt_embeds]
    check_count(FIELD, len(given), MAX_ANSWERS)
    if not given:
        raise EmptyPrompt(f"{FIELD} is an empty list")
    return [prompt_of_embeds(each, size, context.max_model_len) for each in given]


def _returns_prompt_only(body: GenerationBody) -> bool:
    return isinstance(body, CompletionBody) and body.echo and body.max_tokens == 0


def _best_of(body: CompletionBody) -> int:
    """Return the number of answers to generate per prompt."""
    if body.best_of is None:
        return body.n
    if body.best_of < body.n:
        raise InvalidRequest(f"best_of is {body.best_of}; it must be at least n", "best_of")
    if body.stream and body.best_of > body.n:
        raise UnsupportedInput(
            "best_of above n needs stream: false, since answers are ranked at the end", "best_of"
        )
    return body.best_of


def chat_completion_from(
    fields: Mapping[str, Any], request_id: str, context: ModelContext
) -> ParsedRequest:
    """Parse a chat completion. Raises InvalidRequest and UnsupportedInput."""
    body = openai_body(fields, ChatBody)
    return chat_request_from(messages_from(body.messages), body, request_id, context)


def chat_request_from(
    messages: Sequence[ChatMessage], body: ChatOptions, request_id: str, context: ModelContext
) -> ParsedRequest:
    """Return the request for an answer to messages. Raises InvalidRequest and UnsupportedInput."""
    choice = tool_choice_from(body, context.parsing)
    prompt = chat_from(messages, body, choice.shown)
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    # The default is the rest of the context, which the pipeline computes once it has tokenized.
    rest = MAX_INT32 if context.max_model_len is None else context.max_model_len
    overrides: dict[str, Any] = {"max_tokens": rest if max_tokens is None else max_tokens}
    num_logprobs = _num_logprobs(body)
    if num_logprobs is not None:
        overrides["logprobs"] = num_logprobs
        if max_tokens is None and not body.stream:
            overrides["max_tokens"] = min(rest, max_tokens_with_logprobs(num_logprobs, body.n))
    output_format = _output_format(body, choice)
    return _parsed_request(
        body,
        [prompt],
        overrides,
        request_id,
        context,
        num_each=body.n,
        num_logprobs=num_logprobs,
        output_format=output_format,
        text_format=TextFormat(
            context.parsing,
            choice.tool_call_mode,
            choice.name,
            has_one_call=not body.parallel_tool_calls,
            constraint=_constraint_of(output_format, choice),
            tools=choice.shown,
        ),
        fills_context=max_tokens is None,
        prediction="" if body.prediction is None else body.prediction.text,
    )


def _num_logprobs(body: ChatOptions) -> int | None:
    if body.top_logprobs is not None and body.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {body.top_logprobs}; it must be at most {MAX_TOP_LOGPROBS}",
            "top_logprobs",
        )
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    return body.top_logprobs or 0


def _parsed_request(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    overrides: Mapping[str, Any],
    request_id: str,
    context: ModelContext,
    *,
    num_each: int,
    num_logprobs: int | None,
    output_format: OutputFormat | None,
    text_format: TextFormat = PLAIN_TEXT,
    fills_context: bool = False,
    prediction: str = "",
) -> ParsedRequest:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    check_texts(body.model, body.cache_salt, stop, body.bad_words)
    _check_num_answers(body, len(prompts), num_each)
    form = None if output_format is None else output_format.form
    sampling = context.defaults.params(
        **{**_sampling(body), **overrides, "structured_outputs": form}
    )
    hints, kv_params = _kv_hints(body), body.kv_transfer_params
    call = GenerateCall(
        request_id=request_id,
        prompt=prompts[0],
        sampling=sampling,
        task=task_of(hints),
        stop=StopRule(
            tuple(filter(None, stop)), body.include_stop_str_in_output, sampling.min_tokens
        ),
        model=context.variant,
        priority=body.priority,
        cache_salt=body.cache_salt,
        kv_hints=hints,
        prediction=prediction,
        bad_words=tuple(body.bad_words),
        shown_tokens=text_format.marks,
        reasoning=None if form is None else text_format.reasoning_tokens,
        fills_context=fills_context,
        foreign_kv=foreign_kv_from(kv_params) if kv_params else None,
    )
    calls = calls_for_answers(call, prompts, num_each)
    if not body.stream:
        _check_logprobs_fit(calls, context)
    field = "" if output_format is None else output_format.field
    options = _response_options(body, num_logprobs, text_format, field)
    return ParsedRequest(tuple(calls), num_each, body.n, options)


def _kv_hints(body: GenerationBody) -> KvHints:
    hints = dict(body.kv_hints)
    if not hints["release"] and "retain_s" not in body.kv_hints.model_fields_set:
        hints["retain_s"] = body.retain_s
    return KvHints(**hints)


def _check_num_answers(body: GenerationBody, num_prompts: int, num_each: int) -> None:
    num_answers = num_each * num_prompts
    if num_answers > MAX_ANSWERS:
        more = "n" if num_each == body.n else "best_of"
        field = "prompt" if num_prompts > MAX_ANSWERS else more
        raise InvalidRequest(
            f"{num_answers} answers were requested; the limit is {MAX_ANSWERS}", field
        )


def _response_options(
    body: GenerationBody, num_logprobs: int | None, text_format: TextFormat, form_field: str
) -> ResponseOptions:
    if not body.stream and "stream_options" in body.model_fields_set:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedInput("prompt_logprobs needs stream: false", "prompt_logprobs")
    usage = body.stream_options
    return ResponseOptions(
        is_chat=isinstance(body, ChatBody),
        is_streamed=body.stream,
        with_usage=usage.include_usage,
        with_usage_so_far=usage.include_usage and usage.continuous_usage_stats,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        echoes=isinstance(body, CompletionBody) and body.echo,
        with_answer=not _returns_prompt_only(body),
        with_token_ids=body.return_token_ids,
        tokens_by_id=body.return_tokens_as_token_ids,
        text_format=text_format,
        stop_token_ids=tuple(body.stop_token_ids),
        form_field=form_field,
    )


def _check_logprobs_fit(calls: Sequence[GenerateCall], context: ModelContext) -> None:
    """Check the size of a whole answer, which has all logprobs in one body, unlike a stream."""
    sampling, num_answers = calls[0].sampling, len(calls)
    if sampling.logprobs is None:
        return
    longest = min(sampling.max_tokens, context.max_model_len or sampling.max_tokens)
    limit = max_tokens_with_logprobs(sampling.logprobs, num_answers)
    if longest > limit:
        raise InvalidRequest(
            f"max_tokens is {sampling.max_tokens}: with {sampling.logprobs} logprobs, each of "
            f"{num_answers} answers can have {limit} tokens in one body; lower max_tokens, n or "
            "logprobs, or stream the answer",
            "max_tokens",
        )


def _constraint_of(output_format: OutputFormat | None, choice: ToolChoice) -> Constraint:
    if output_format is None:
        return Constraint.NONE
    is_by_model = choice.form is not None and choice.tool_call_mode is ToolCallMode.BY_MODEL
    return Constraint.CALLS if is_by_model else Constraint.ANSWER


def _output_format(body: GenerationBody, choice: ToolChoice) -> OutputFormat | None:
    given = output_format_from(body)
    if choice.form is None:
        return given
    if given is not None:
        raise InvalidRequest(
            "tool_choice forces a call and cannot be combined with another output format: leave "
            "out one of them",
            "tool_choice",
        )
    return OutputFormat(TOOLS, choice.form)


def _sampling(body: GenerationBody) -> dict[str, Any]:
    """Return the sampling parameters that were given. Others default to the model's."""
    check_count("vllm_xargs", len(body.vllm_xargs), MAX_EXTRA_ARGS)
    for name in body.vllm_xargs:
        check_name("vllm_xargs", name)
    chosen = {name: getattr(body, name) for name in (*MODEL_DEFAULTED_FIELDS, *PLAIN)}
    if body.top_k is not None:
        chosen["top_k"] = 0 if body.top_k == -1 else body.top_k  # -1 disables top_k, as in vLLM
    if body.allowed_token_ids is not None:
        chosen["allowed_token_ids"] = tuple(body.allowed_token_ids)
    return {
        **{name: value for name, value in chosen.items() if value is not None},
        "logit_bias": read_logit_bias(body.logit_bias),
        "stop_token_ids": tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "seed": None if body.seed is None else body.seed % NUM_SEEDS,
        "extra_args": {name: parse_argument(value) for name, value in body.vllm_xargs.items()},
    }
