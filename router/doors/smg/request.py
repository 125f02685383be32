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
from baton.router.input_processing.answer_calls import calls_for_answers
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
NUM_SEEDS = 1 << 64
# Constraints by the name of their field, with the field of StructuredOutputs.
CONSTRAINTS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}


def calls_from(
    message: vllm_engine_pb2.GenerateRequest,
    request_id: str,
    served: ServedModel,
    model: ModelVariant,
) -> list[GenerateCall]:
    """Return one call for each answer. Raises InvalidRequest, UnsupportedInput and EmptyPrompt."""
    params = message.sampling_params
    refuse_fields(message, UNSUPPORTED)
    refuse_fields(params, UNSUPPORTED_SAMPLING)
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
    return calls_for_answers(call, [call.prompt], num_answers_of(params, MAX_ANSWERS))


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
    fields = common_fields(params)
    fields["temperature"] = params.temperature if params.HasField("temperature") else 1.0
    longest = served.max_model_len or MAX_INT32
    fields["max_tokens"] = params.max_tokens if params.HasField("max_tokens") else longest
    fields["min_tokens"] = params.min_tokens
    fields["logit_bias"] = dict(params.logit_bias)
    if params.HasField("seed"):
        fields["seed"] = seed_from(params.seed)
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            fields[name] = _num_logprobs(name, getattr(params, name))
    return fields


def _num_logprobs(name: str, count: int) -> int:
    if count < 0:
        raise InvalidRequest(
            f"{name} is {count}: logprobs of the whole vocabulary are not served; ask for a number",
            name,
        )
    return count


def common_fields(message: Any) -> dict[str, Any]:
    """Return fields of SamplingParams. A number that is not set is 0 in these messages."""
    return {
        "top_p": message.top_p or 1.0,
        "top_k": max(0, message.top_k),
        "min_p": message.min_p,
        "frequency_penalty": message.frequency_penalty,
        "presence_penalty": message.presence_penalty,
        "repetition_penalty": message.repetition_penalty or 1.0,
        "stop_token_ids": tuple(message.stop_token_ids),
        "ignore_eos": message.ignore_eos,
        "structured_outputs": _structured_outputs(message),
    }


def _structured_outputs(message: Any) -> StructuredOutputs | None:
    name = message.WhichOneof("constraint")
    if name is None:
        return None
    if name == "choice":
        return StructuredOutputs(choice=tuple(message.choice.choices))
    constraint = getattr(message, name)
    if not constraint:
        raise InvalidRequest(f"{name} is empty: leave it out", name)
    return StructuredOutputs(**{CONSTRAINTS[name]: constraint})


def refuse_fields(message: Any, unsupported: Mapping[str, str]) -> None:
    """Raise UnsupportedInput if a field is set that is not supported; with what to do instead."""
    for descriptor, _ in message.ListFields():
        advice = unsupported.get(descriptor.name)
        if advice is not None:
            raise UnsupportedInput(f"{descriptor.name} is not supported here: {advice}")


def seed_from(seed: int) -> int:
    """Return the seed of a signed number."""
    return seed % NUM_SEEDS


def num_answers_of(message: Any, limit: int) -> int:
    """Return the number of answers; 0 stands for one. Raises InvalidRequest."""
    count: int = message.n or 1
    if count > limit:
        raise InvalidRequest(f"n is {count}; it must be from 1 to {limit}", "n")
    return count
