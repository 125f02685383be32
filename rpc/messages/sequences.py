"""Conversion between orders of the node protocol and engine requests. Pure."""

from __future__ import annotations

from baton.core.errors import InvalidRequest
from baton.core.ids import HandoffId, RequestId
from baton.core.kv_hints import NO_KV_HINTS
from baton.core.request import EngineRequest, PrefixSource, ReceiveKv
from baton.rpc.errors import UnsupportedInput
from baton.rpc.messages.conversion import (
    handoff_from,
    handoff_to,
    kv_hints_from,
    kv_hints_to,
    peer_from,
    peer_to,
    sampling_from,
    sampling_to,
)
from baton.v1 import node_pb2

MAX_AGE_S = 1e9
# Clients may use 256. Routers append the attempt, the answer's index and the client's token hash.
MAX_NAME_CHARACTERS = 512


def node_request_id(handoff_id: HandoffId) -> RequestId:
    """Return the request id inside a node. It is unique per attempt."""
    return RequestId(str(handoff_id))


def handoff_id_of(request_id: RequestId) -> HandoffId:
    """Return the hand-off id of an attempt: the inverse of `node_request_id`."""
    name, _, attempt = request_id.rpartition("#")
    return HandoffId(name, int(attempt))


def prefill_spec(order: node_pb2.PrefillOrder, now: float) -> EngineRequest:
    handoff_id = handoff_from(order.handoff_id)
    is_prefetch = order.sequence.cache_hints.hints.prefetch
    return _spec(order.sequence, handoff_id, now, send_to=None if is_prefetch else handoff_id)


def decode_spec(order: node_pb2.DecodeOrder, now: float) -> EngineRequest:
    handoff_id = handoff_from(order.handoff_id)
    receive = None
    if order.HasField("prefill") and not order.sequence.cache_hints.hints.prefetch:
        receive = ReceiveKv(handoff_id, peer_from(order.prefill))
    return _spec(order.sequence, handoff_id, now, receive_from=receive)


def prefill_order(request: EngineRequest) -> node_pb2.PrefillOrder:
    handoff_id = handoff_to(handoff_id_of(request.request_id))
    return node_pb2.PrefillOrder(handoff_id=handoff_id, sequence=_sequence_to(request))


def decode_order(request: EngineRequest) -> node_pb2.DecodeOrder:
    """Without `receive_from`, the decode node computes the prompt itself."""
    receive = request.receive_from
    return node_pb2.DecodeOrder(
        handoff_id=handoff_to(handoff_id_of(request.request_id)),
        sequence=_sequence_to(request),
        prefill=None if receive is None else peer_to(receive.source),
    )


def _spec(
    message: node_pb2.Sequence,
    handoff_id: HandoffId,
    now: float,
    *,
    receive_from: ReceiveKv | None = None,
    send_to: HandoffId | None = None,
) -> EngineRequest:
    for name in (handoff_id.request_id, message.cache_salt, message.cache_hints.tenant):
        if len(name) > MAX_NAME_CHARACTERS:
            raise InvalidRequest(
                f"a request id, cache salt or tenant has {len(name)} characters; the limit is "
                f"{MAX_NAME_CHARACTERS}"
            )
    if message.sampling.stop:
        raise UnsupportedInput("nodes have no tokenizer: the router must apply stop strings")
    return EngineRequest(
        request_id=node_request_id(handoff_id),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from(message.sampling),
        seed=message.seed,
        arrival_s=now,
        age_s=_age_s(message),
        priority=message.priority,
        cache_salt=message.cache_salt,
        tenant=message.cache_hints.tenant,
        kv_hints=kv_hints_from(message.cache_hints.hints),
        prior_output_token_ids=tuple(message.prior_output_token_ids),
        is_paced=message.is_paced,
        receive_from=receive_from,
        send_to=send_to,
        prefix_source=_prefix_source_from(message),
    )


def _prefix_source_from(message: node_pb2.Sequence) -> PrefixSource | None:
    if not message.HasField("prefix_source"):
        return None
    source = message.prefix_source
    return PrefixSource(peer_from(source.peer), source.num_tokens)


def _sequence_to(request: EngineRequest) -> node_pb2.Sequence:
    source = request.prefix_source
    return node_pb2.Sequence(
        prompt_token_ids=request.prompt_token_ids,
        prior_output_token_ids=request.prior_output_token_ids,
        sampling=sampling_to(request.sampling),
        seed=request.seed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        is_paced=request.is_paced,
        age_s=request.age_s,
        prefix_source=None
        if source is None
        else node_pb2.PrefixSource(peer=peer_to(source.peer), num_tokens=source.num_tokens),
        cache_hints=_cache_hints_to(request),
    )


def _cache_hints_to(request: EngineRequest) -> node_pb2.CacheHints | None:
    if request.kv_hints == NO_KV_HINTS and not request.tenant:
        return None
    return node_pb2.CacheHints(hints=kv_hints_to(request.kv_hints), tenant=request.tenant)


def _age_s(message: node_pb2.Sequence) -> float:
    """Return the age, or 0 if it is negative or NaN, which would break the order of the queue."""
    return message.age_s if 0 <= message.age_s < MAX_AGE_S else 0.0
