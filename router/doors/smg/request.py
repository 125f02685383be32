"""Converts SMG's GenerateRequest of vLLM engines to calls of the pipeline. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2

from baton.core.errors import InvalidRequest
from baton.core.ids import ModelVariant
from baton.core.sampling import MAX_LOGIT_BIASES
from baton.core.stop_strings import StopRule
from baton.core.structured_outputs import StructuredOutputs
from baton.router.answers import calls_for_answers
from baton.router.input_processing.limits import (
    MAX_ANSWERS,
    check_count,
    check_prompt_length,
    check_texts,
)
from baton.router.routing.served_models import ServedModel
from baton.router.values import GenerateCall, Prompt, TextPrompt, TokenPrompt
from baton.rpc.errors import EmptyPrompt, UnsupportedInput

MAX_INT32 = (1 << 31) - 1
NUM_SEEDS = 1 << 64
NO_MEDIA = "no model here takes images, video or audio; send text alone"
NO_TRANSFER = "the router transfers KV itself; start the gateway without --pd-disaggregation"
UNSUPPORTED = {
    "kv_transfer_params": NO_TRANSFER,
    "kv_transfer_params_json": NO_TRANSFER,
    "mm_inputs": NO_MEDIA,
    "extra_mm_inputs": NO_MEDIA,
    "media_refs": NO_MEDIA,
    "data_parallel_rank": "the router is one rank; start the gateway without --dp-aware",
}
UNSUPPORTED_SAMPLING = {"truncate_prompt_tokens": "shorten the prompt instead"}


def calls_from(
    message: vllm_engine_pb2.GenerateRequest,
    request_id: str,
    served: ServedModel,
    model: ModelVariant,
) -> list[GenerateCall]:
    """Return one call for each answer. Raises InvalidRequest, UnsupportedInput and EmptyPrompt."""
    params = message.sampling_params
    _refuse_fields(message, UNSUPPORTED)
    _refuse_fields(params, UNSUPPORTED_SAMPLING)
    check_texts("", "", params.stop, ())
    sampling = served.sampling_defaults.params(**_sampling_fields(params, served))
    stop = StopRule(
        tuple(filter(None, params.stop)), params.include_stop_str_in_output, sampling.min_tokens
    )
    call = GenerateCall(
        request_id=request_id,
        prompt=_prompt_from(message, served),
        sampling=sampling,
        stop=stop,
        model=model,
        fills_context=not params.HasField("max_tokens"),
    )
    return calls_for_answers(call, [call.prompt], _num_answers_of(params))


def _prompt_from(message: vllm_engine_pb2.GenerateRequest, served: ServedModel) -> Prompt:
    match message.WhichOneof("input"):
        case "tokenized":
            check_prompt_length(len(message.tokenized.input_ids), served.max_model_len)
            return TokenPrompt(tuple(message.tokenized.input_ids))
        case "text":
            return TextPrompt(message.text)
    raise EmptyPrompt("no prompt: set one of tokenized and text")


def _sampling_fields(params: vllm_engine_pb2.SamplingParams, served: ServedModel) -> dict[str, Any]:
    """Return the fields, with vLLM's defaults for those that the gateway leaves out.

    It has applied the defaults of the model, which GetModelInfo reports.
    """
    check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIASES)
    longest = served.max_model_len or MAX_INT32
    fields: dict[str, Any] = {
        "temperature": params.temperature if params.HasField("temperature") else 1.0,
        # A number that is not set is 0 in these messages.
        "top_p": params.top_p or 1.0,
        "top_k": max(0, params.top_k),
        "min_p": params.min_p,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty or 1.0,
        "max_tokens": params.max_tokens if params.HasField("max_tokens") else longest,
        "min_tokens": params.min_tokens,
        "stop_token_ids": tuple(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logit_bias": dict(params.logit_bias),
        "structured_outputs": _structured_outputs(params),
    }
    if params.HasField("seed"):
        fields["seed"] = params.seed % NUM_SEEDS  # it is signed
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            fields[name] = _num_logprobs(name, getattr(params, name))
    return fields


def _structured_outputs(params: vllm_engine_pb2.SamplingParams) -> StructuredOutputs | None:
    name = params.WhichOneof("constraint")
    if name is None:
        return None
    if name == "choice":
        return StructuredOutputs(choice=tuple(params.choice.choices))
    constraint = getattr(params, name)
    if not constraint:
        raise InvalidRequest(f"{name} is empty: leave it out", name)
    return StructuredOutputs(**{"json" if name == "json_schema" else name: constraint})


def _num_logprobs(name: str, count: int) -> int:
    if count < 0:
        raise InvalidRequest(
            f"{name} is {count}: logprobs of the whole vocabulary are not served; ask for a number",
            name,
        )
    return count


def _num_answers_of(params: vllm_engine_pb2.SamplingParams) -> int:
    """Return the number of answers; 0 stands for one. Raises InvalidRequest."""
    count: int = params.n or 1
    if count > MAX_ANSWERS:
        raise InvalidRequest(f"n is {count}; it must be from 1 to {MAX_ANSWERS}", "n")
    return count


def _refuse_fields(message: Any, unsupported: Mapping[str, str]) -> None:
    """Raise UnsupportedInput if a field is set that is not supported; with what to do instead."""
    for descriptor, _ in message.ListFields():
        advice = unsupported.get(descriptor.name)
        if advice is not None:
            raise UnsupportedInput(f"{descriptor.name} is not supported here: {advice}")
