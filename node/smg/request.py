"""Converts SMG's GenerateRequest of SGLang schedulers to requests of the engine. Pure."""

from __future__ import annotations

from dataclasses import replace

from smg_grpc_proto.generated import sglang_scheduler_pb2

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.ids import HandoffId, NodeId, Peer
from baton.core.legs import LegKind
from baton.core.request import EngineRequest, ReceiveKv
from baton.core.sampling import SamplingParams, fit_max_tokens, read_logit_bias
from baton.rpc.errors import EmptyPrompt, UnsupportedInput
from baton.rpc.messages.calls import node_request_id
from baton.rpc.node_info import NodeCard
from baton.rpc.smg.sampling import common_fields, num_answers_of, refuse_fields, seed_from

MAX_ANSWERS = 128  # `n` of one request
MAX_REQUEST_ID_CHARACTERS = 256
MAX_PORT = 65535
ATTEMPT = 1  # the gateway draws a new room for each
PREFIX = "smg"  # of the names of hand-offs
SEED_BITS = 64

UNSUPPORTED = {
    "mm_inputs": "no model here takes images, video or audio; send text alone",
    "token_ids_logprob": "use top_logprobs_num",
    "return_hidden_states": "no node returns them",
    "custom_logit_processor": "nodes have those that are installed on them",
    "input_embeds": "send token ids",
    "lora_id": "adapters are served by Baton's router",
}
UNSUPPORTED_SAMPLING = {"custom_params": "nodes have no custom parameters over this protocol"}


def requests_from(
    message: sglang_scheduler_pb2.GenerateRequest, card: NodeCard, now: float, seed: int
) -> list[EngineRequest]:
    """Return one request for each answer.

    Both nodes of a pair get the same message: room and request id name the hand-off, so that a
    room that is drawn twice mixes no KV. `seed` is for an answer of one node alone.

    Raises InvalidRequest, UnsupportedInput and EmptyPrompt.
    """
    refuse_fields(message, UNSUPPORTED)
    refuse_fields(message.sampling_params, UNSUPPORTED_SAMPLING)
    if message.HasField("data_parallel_rank") and message.data_parallel_rank:
        raise UnsupportedInput("data_parallel_rank is not supported: a node is one rank")
    _check_pair(message, card)
    if not 0 < len(message.request_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequest(
            f"request_id must have 1 to {MAX_REQUEST_ID_CHARACTERS} characters", "request_id"
        )
    prompt = _prompt_from(message, card)
    sampling = _sampling_from(message, card, len(prompt))
    if message.HasField("disaggregated_params"):
        seed = message.disaggregated_params.bootstrap_room
    count = num_answers_of(message.sampling_params, MAX_ANSWERS)
    return [_request(message, card, prompt, sampling, index, now, seed) for index in range(count)]


def _check_pair(message: sglang_scheduler_pb2.GenerateRequest, card: NodeCard) -> None:
    if not message.HasField("disaggregated_params"):
        if LegKind.DECODE not in card.legs:
            raise InvalidRequest(
                "disaggregated_params is missing: a prefill node serves no whole answers; start "
                "the gateway with --pd-disaggregation, and this node as --prefill",
                "disaggregated_params",
            )
        return
    pair = message.disaggregated_params
    if not pair.bootstrap_host or not 0 < pair.bootstrap_port <= MAX_PORT:
        raise InvalidRequest(
            f"no prefill node is at {pair.bootstrap_host!r}, port {pair.bootstrap_port}: give the "
            "gateway its URL and its port, as --prefill grpc://HOST:PORT PORT",
            "disaggregated_params",
        )


def _prompt_from(message: sglang_scheduler_pb2.GenerateRequest, card: NodeCard) -> tuple[int, ...]:
    token_ids = message.tokenized.input_ids
    longest = card.max_sequence_length
    if not token_ids:
        raise EmptyPrompt("the prompt has no tokens; there is nothing to continue")
    if len(token_ids) >= longest:
        raise ContextLengthExceeded.of_prompt(len(token_ids), longest, "tokenized")
    return tuple(token_ids)


def _sampling_from(
    message: sglang_scheduler_pb2.GenerateRequest, card: NodeCard, num_prompt_tokens: int
) -> SamplingParams:
    """Return the parameters. Stop strings are left to the gateway, which has the text."""
    params = message.sampling_params
    has_limit = params.HasField("max_new_tokens")
    fields = common_fields(params) | {
        "temperature": params.temperature,
        "max_tokens": params.max_new_tokens if has_limit else card.max_sequence_length,
        "min_tokens": params.min_new_tokens,
        "logit_bias": read_logit_bias(params.logit_bias),
    }
    if message.return_logprob:
        fields["logprobs"] = message.top_logprobs_num
        if message.logprob_start_len > 0:
            raise UnsupportedInput(
                "logprob_start_len must be 0, for the whole prompt, or -1, for none of it"
            )
        if message.logprob_start_len == 0:
            fields["prompt_logprobs"] = message.top_logprobs_num
    sampling, _ = fit_max_tokens(
        SamplingParams(**fields), num_prompt_tokens, card.max_sequence_length
    )
    return sampling


def _request(
    message: sglang_scheduler_pb2.GenerateRequest,
    card: NodeCard,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    index: int,
    now: float,
    seed: int,
) -> EngineRequest:
    pair = message.disaggregated_params
    handoff_id = HandoffId(f"{PREFIX}-{pair.bootstrap_room}-{message.request_id}-{index}", ATTEMPT)
    request = EngineRequest(
        request_id=node_request_id(handoff_id),
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=seed_from(seed + index),
        arrival_s=now,
    )
    if LegKind.DECODE not in card.legs:
        return replace(request, send_to=handoff_id)
    if not message.HasField("disaggregated_params"):
        return request
    host = f"[{pair.bootstrap_host}]" if ":" in pair.bootstrap_host else pair.bootstrap_host
    address = f"{host}:{pair.bootstrap_port}"
    source = Peer(NodeId(address), address)
    return replace(request, receive_from=ReceiveKv(handoff_id, source))
