"""Conversion between protobuf messages and values: sampling, tokens, hand-offs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.message import Message

from baton.core.extra_args import parse_argument
from baton.core.ids import HandoffId, NodeId, Peer, RequestId
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.logprobs import TokenLogprobs
from baton.core.output import Failure, FinishReason, Output
from baton.core.sampling import NO_SAMPLING_DEFAULTS, Argument, SamplingDefaults, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.v1 import kv_hints_pb2, node_pb2, sampling_pb2

# Fields with the same name and meaning on both sides, optional in the message.
SCALARS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
)
# Sampling parameters that the router applies itself.
ROUTER_FIELDS = frozenset({"stop", "include_stop_in_output", "bad_words"})
FINISH_TO_MESSAGE = {
    None: sampling_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: sampling_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: sampling_pb2.FINISH_REASON_ERROR,
    FinishReason.HANDED_OFF: sampling_pb2.FINISH_REASON_HANDED_OFF,
}
FINISH_FROM_MESSAGE = {number: reason for reason, number in FINISH_TO_MESSAGE.items()}


def sampling_from(
    message: sampling_pb2.SamplingParams, defaults: SamplingDefaults = NO_SAMPLING_DEFAULTS
) -> SamplingParams:
    """Raises InvalidRequest. Stop strings are not converted, since the engine has none."""
    present_fields = ((descriptor.name, value) for descriptor, value in message.ListFields())
    return defaults.params(
        **{
            name: CONVERTERS[name](value) if name in CONVERTERS else value
            for name, value in present_fields
            if name not in ROUTER_FIELDS
        }
    )


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


def structured_outputs_from(message: sampling_pb2.StructuredOutputs) -> StructuredOutputs:
    """Raises InvalidRequest."""
    form = message.WhichOneof("form")
    form_args: Any = {} if form is None else {form: getattr(message, form)}
    if form == "choice":
        form_args = {form: tuple(message.choice.texts)}
    return StructuredOutputs(**form_args, disable_any_whitespace=message.disable_any_whitespace)


# Conversions of the sampling parameters that are neither numbers nor flags.
CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": dict,
    "allowed_token_ids": lambda listed: tuple(listed.ids),
    "banned_token_ids": tuple,
    "stop_token_ids": tuple,
    "structured_outputs": structured_outputs_from,
    "banned_sequences": lambda sequences: tuple(tuple(banned.ids) for banned in sequences),
    "extra_args": lambda values: {name: argument_from(value) for name, value in values.items()},
}


def structured_outputs_to(value: StructuredOutputs | None) -> sampling_pb2.StructuredOutputs | None:
    if value is None:
        return None
    form_args: Any = {value.form: getattr(value, value.form)}
    if value.choice:
        form_args = {"choice": sampling_pb2.Choice(texts=value.choice)}
    return sampling_pb2.StructuredOutputs(
        **form_args, disable_any_whitespace=value.disable_any_whitespace
    )


def sampling_to(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    extra_args = {name: argument_to(value) for name, value in sampling.extra_args.items()}
    message = sampling_pb2.SamplingParams(
        **{name: getattr(sampling, name) for name in SCALARS},
        logit_bias=sampling.logit_bias or None,  # None costs less than an empty map
        banned_token_ids=sampling.banned_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        structured_outputs=structured_outputs_to(sampling.structured_outputs),
        banned_sequences=[sampling_pb2.TokenIds(ids=ids) for ids in sampling.banned_sequences],
        extra_args=extra_args or None,
    )
    if sampling.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(sampling.allowed_token_ids)
    return message


def kv_hints_from(message: kv_hints_pb2.KvHints) -> KvHints:
    """Raises InvalidRequest."""
    return KvHints(**{field.name: value for field, value in message.ListFields()})


def kv_hints_to(hints: KvHints) -> kv_hints_pb2.KvHints | None:
    """Return None without hints: an unset message costs nothing."""
    if hints == NO_KV_HINTS:
        return None
    return kv_hints_pb2.KvHints(
        session_id=hints.session_id,
        retain_s=hints.retain_s,
        priority=hints.priority,
        release=hints.release,
        prefetch=hints.prefetch,
    )


def sampling_defaults_from(message: sampling_pb2.SamplingDefaults) -> SamplingDefaults:
    return SamplingDefaults(**{field.name: value for field, value in message.ListFields()})


def sampling_defaults_to(value: SamplingDefaults) -> sampling_pb2.SamplingDefaults:
    return sampling_pb2.SamplingDefaults(
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        min_p=value.min_p,
        repetition_penalty=value.repetition_penalty,
    )


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


def output_from(message: node_pb2.TokenOutput, request_id: RequestId) -> Output:
    first_index, token_ids = message.first_index, tuple(message.token_ids[:])
    if not (message.finish_reason or message.logprobs or message.prompt_logprobs):
        return Output(request_id, first_index, token_ids)  # fast path for nearly all messages
    return Output(
        request_id=request_id,
        first_index=first_index,
        token_ids=token_ids,
        logprobs=tuple(map(logprobs_from, message.logprobs)),
        prompt_logprobs=prompt_logprobs_from(message.prompt_logprobs),
        finish_reason=FINISH_FROM_MESSAGE[message.finish_reason],
        stop_token_id=present(message, "stop_token_id", message.stop_token_id),
        failure=Failure(message.error) if message.error else None,
        first_prompt_index=message.first_prompt_index,
    )


def output_to(output: Output) -> node_pb2.TokenOutput:
    return node_pb2.TokenOutput(
        first_index=output.first_index,
        token_ids=output.token_ids,
        logprobs=[logprobs_to(entry) for entry in output.logprobs],
        prompt_logprobs=prompt_logprobs_to(output.prompt_logprobs),
        finish_reason=FINISH_TO_MESSAGE[output.finish_reason],
        stop_token_id=output.stop_token_id,
        error="" if output.failure is None else output.failure.reason,
        first_prompt_index=output.first_prompt_index,
    )


def handoff_from(message: node_pb2.HandoffId) -> HandoffId:
    return HandoffId(message.request_id, message.attempt)


def handoff_to(handoff_id: HandoffId) -> node_pb2.HandoffId:
    return node_pb2.HandoffId(request_id=handoff_id.request_id, attempt=handoff_id.attempt)


def peer_from(message: node_pb2.Peer) -> Peer:
    return Peer(NodeId(message.node_id), message.address)


def peer_to(peer: Peer) -> node_pb2.Peer:
    return node_pb2.Peer(node_id=peer.node_id, address=peer.address)


def fingerprint_from(message: node_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        model=message.model,
        dtype=message.dtype,
        layout=message.layout,
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        kv_groups=message.kv_groups,
        wire_version=message.wire_version,
    )


def fingerprint_to(value: Fingerprint) -> node_pb2.Fingerprint:
    return node_pb2.Fingerprint(
        model=value.model,
        dtype=value.dtype,
        layout=value.layout,
        block_size=value.block_size,
        num_layers=value.num_layers,
        num_kv_heads=value.num_kv_heads,
        head_dim=value.head_dim,
        kv_groups=value.kv_groups,
        wire_version=value.wire_version,
    )


def present(message: Message, name: str, value: int) -> int | None:
    """Return `value`, or None if the message's optional field `name` is unset."""
    return value if message.HasField(name) else None
