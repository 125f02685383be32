"""Mappers between protobuf messages and values, and the conversions that no mapper can do. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import struct_pb2

from baton.core.extra_args import parse_argument
from baton.core.ids import HandoffId, Peer, RequestId
from baton.core.kv_hints import KvHints
from baton.core.output import Failure, Finish, Output, Served, TokenLogprobs
from baton.core.sampling import NO_SAMPLING_DEFAULTS, Argument, SamplingDefaults, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.rpc.messages.mapper import Converter, Mapper
from baton.v1 import inference_pb2, kv_hints_pb2, node_pb2, sampling_pb2

HANDOFF = Mapper(HandoffId, node_pb2.HandoffId)
PEER = Mapper(Peer, node_pb2.Peer)
KV_HINTS = Mapper(KvHints, kv_hints_pb2.KvHints)
SAMPLING_DEFAULTS = Mapper(SamplingDefaults, sampling_pb2.SamplingDefaults)
STRUCTURED_OUTPUTS = Mapper(StructuredOutputs, sampling_pb2.StructuredOutputs)
TIMES = ("dispatched_s", "first_token_s", "first_decoded_token_s", "finished_s")
COUNTS = ("num_prompt_tokens", "num_completion_tokens", "num_cached_prompt_tokens")
REMOTE, LOCAL = inference_pb2.PREFILL_PLACE_REMOTE, inference_pb2.PREFILL_PLACE_LOCAL

_SERVED = Mapper(Served, inference_pb2.Served, unmapped=("prefill", "is_prefill_remote"))


def argument_from(value: struct_pb2.Value) -> Argument:
    """Raises InvalidRequest."""
    if value.WhichOneof("kind") == "list_value":
        return parse_argument([_scalar_from(item) for item in value.list_value.values])
    return parse_argument(_scalar_from(value))


def _scalar_from(value: struct_pb2.Value) -> object:
    """Return the value that is set. `parse_argument` rejects types that are not allowed."""
    kind = value.WhichOneof("kind")
    return None if kind in (None, "null_value") else getattr(value, kind)


def argument_to(value: Argument) -> struct_pb2.Value:
    if isinstance(value, tuple):
        values = [argument_to(item) for item in value]
        return struct_pb2.Value(list_value=struct_pb2.ListValue(values=values))
    if isinstance(value, bool):
        return struct_pb2.Value(bool_value=value)
    if isinstance(value, str):
        return struct_pb2.Value(string_value=value)
    return struct_pb2.Value(number_value=value)


EXTRA_ARGS = Converter(
    lambda values: {name: argument_from(value) for name, value in values.items()},
    lambda values: {name: argument_to(value) for name, value in values.items()},
)
SAMPLING = Mapper(
    SamplingParams,
    sampling_pb2.SamplingParams,
    converters={"extra_args": EXTRA_ARGS},
    # The router applies these itself: nodes have no tokenizer.
    unmapped=("stop", "include_stop_in_output", "bad_words"),
)


def sampling_from(
    message: sampling_pb2.SamplingParams, defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS
) -> SamplingParams:
    """Return the parameters, with `defaults` for the missing ones. Raises InvalidRequest."""
    return defaults.params(**SAMPLING.fields_of(message))


def logprobs_from(message: sampling_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def logprobs_to(value: TokenLogprobs) -> sampling_pb2.TokenLogprobs:
    top = [sampling_pb2.TopLogprob(token_id=token, logprob=logp) for token, logp in value.top]
    return sampling_pb2.TokenLogprobs(
        token_id=value.token_id, logprob=value.logprob, rank=value.rank, top=top
    )


def prompt_logprobs_from(
    messages: Iterable[sampling_pb2.PromptLogprobs],
) -> tuple[TokenLogprobs | None, ...]:
    return tuple(
        [logprobs_from(entry.token) if entry.HasField("token") else None for entry in messages]
    )


def prompt_logprobs_to(
    values: Iterable[TokenLogprobs | None],
) -> list[sampling_pb2.PromptLogprobs]:
    return [
        sampling_pb2.PromptLogprobs(token=None if entry is None else logprobs_to(entry))
        for entry in values
    ]


LOGPROBS = Converter(
    lambda messages: tuple(map(logprobs_from, messages)),
    lambda values: list(map(logprobs_to, values)),
)
PROMPT_LOGPROBS = Converter(prompt_logprobs_from, prompt_logprobs_to)
_OUTPUT = Mapper(
    Output,
    node_pb2.TokenOutput,
    converters={"logprobs": LOGPROBS, "prompt_logprobs": PROMPT_LOGPROBS},
    unmapped=("request_id", "registration", "failure", "error", "served"),
)


def output_from(message: node_pb2.TokenOutput, request_id: RequestId) -> Output:
    if not (message.finish_reason or message.logprobs or message.prompt_logprobs):
        # The fast path for nearly all messages: a mapper would take three times as long.
        return Output(request_id, message.first_index, tuple(message.token_ids[:]))
    failure = Failure(message.error) if message.error else None
    return _OUTPUT.from_message(message, request_id=request_id, failure=failure)


def output_to(output: Output) -> node_pb2.TokenOutput:
    return _OUTPUT.to_message(output, error="" if output.failure is None else output.failure.reason)


def _served_from(message: inference_pb2.Served) -> Served:
    return _SERVED.from_message(message, is_prefill_remote=message.prefill == REMOTE)


def _served_to(served: Served) -> inference_pb2.Served:
    return _SERVED.to_message(served, prefill=REMOTE if served.is_prefill_remote else LOCAL)


_FINISH = Mapper(
    Finish,
    inference_pb2.Finish,
    converters={"served": Converter(_served_from, _served_to)},
    unmapped=(*TIMES, *COUNTS, "timings", "usage"),
)


def finish_from(message: inference_pb2.Finish) -> Finish:
    """Convert the end of an answer: `Finish` is flat, its message has parts."""
    usage = message.usage
    has_cached = usage.HasField("cached_prompt_tokens")
    return _FINISH.from_message(
        message,
        num_prompt_tokens=usage.prompt_tokens,
        num_completion_tokens=usage.completion_tokens,
        num_cached_prompt_tokens=usage.cached_prompt_tokens if has_cached else None,
        **{name: getattr(message.timings, name) for name in TIMES},
    )


def finish_to(finish: Finish) -> inference_pb2.Finish:
    return _FINISH.to_message(
        finish,
        usage=inference_pb2.Usage(
            prompt_tokens=finish.num_prompt_tokens,
            completion_tokens=finish.num_completion_tokens,
            cached_prompt_tokens=finish.num_cached_prompt_tokens,
        ),
        timings=inference_pb2.Timings(**{name: getattr(finish, name) for name in TIMES}),
    )
