"""Conversion between protobuf messages and values of the KV control link. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.core.ids import BlockId, Incarnation, NodeId
from baton.core.logprobs import FirstToken
from baton.kv_transfer.protocol.messages import (
    Closed,
    Done,
    Failed,
    Grant,
    Hello,
    LinkMessage,
    Region,
    Renew,
    Renewed,
    Revoked,
    RevokeGrant,
    Writing,
)
from baton.rpc.messages.conversion import (
    fingerprint_from,
    fingerprint_to,
    handoff_from,
    handoff_to,
    logprobs_from,
    logprobs_to,
    present,
)
from baton.v1 import kv_link_pb2


def link_message_from(message: kv_link_pb2.LinkMessage) -> LinkMessage | None:
    """Return the value, or None for a message type that only a newer peer knows."""
    kind = message.WhichOneof("message")
    if kind is None:
        return None
    value: LinkMessage = FROM_MESSAGE[kind](getattr(message, kind))
    return value


def link_message_to(value: LinkMessage) -> kv_link_pb2.LinkMessage:
    name, encode = TO_MESSAGE[type(value)]
    return kv_link_pb2.LinkMessage(**{name: encode(value)})


def _region_from(message: kv_link_pb2.Region) -> Region:
    return Region(message.base, message.num_blocks, message.block_bytes, message.device)


def _region_to(region: Region) -> kv_link_pb2.Region:
    return kv_link_pb2.Region(
        base=region.base,
        num_blocks=region.num_blocks,
        block_bytes=region.block_bytes,
        device=region.device,
    )


def _hello_from(message: kv_link_pb2.Hello) -> Hello:
    return Hello(
        node_id=NodeId(message.node_id),
        incarnation=Incarnation(message.incarnation),
        fingerprint=fingerprint_from(message.fingerprint),
        region=_region_from(message.region),
        transport=message.transport,
        metadata=message.metadata,
        staging=_region_from(message.staging) if message.HasField("staging") else None,
    )


def _hello_to(value: Hello) -> kv_link_pb2.Hello:
    return kv_link_pb2.Hello(
        node_id=value.node_id,
        incarnation=value.incarnation,
        fingerprint=fingerprint_to(value.fingerprint),
        region=_region_to(value.region),
        transport=value.transport,
        metadata=value.metadata,
        staging=None if value.staging is None else _region_to(value.staging),
    )


def _grant_from(message: kv_link_pb2.Grant) -> Grant:
    return Grant(
        handoff_id=handoff_from(message.handoff_id),
        ticket=message.ticket,
        first_block=message.first_block,
        block_ids=tuple(BlockId(block_id) for block_id in message.block_ids),
        lease_s=message.lease_s,
        names=tuple(message.names),
    )


def _grant_to(value: Grant) -> kv_link_pb2.Grant:
    return kv_link_pb2.Grant(
        handoff_id=handoff_to(value.handoff_id),
        ticket=value.ticket,
        first_block=value.first_block,
        block_ids=value.block_ids,
        lease_s=value.lease_s,
        names=value.names,
    )


def _renew_from(message: kv_link_pb2.Renew) -> Renew:
    return Renew(
        tuple(handoff_from(handoff_id) for handoff_id in message.handoff_ids), message.lease_s
    )


def _renew_to(value: Renew) -> kv_link_pb2.Renew:
    handoff_ids = [handoff_to(handoff_id) for handoff_id in value.handoff_ids]
    return kv_link_pb2.Renew(handoff_ids=handoff_ids, lease_s=value.lease_s)


def _renewed_from(message: kv_link_pb2.Renewed) -> Renewed:
    return Renewed(tuple(handoff_from(handoff_id) for handoff_id in message.handoff_ids))


def _renewed_to(value: Renewed) -> kv_link_pb2.Renewed:
    return kv_link_pb2.Renewed(
        handoff_ids=[handoff_to(handoff_id) for handoff_id in value.handoff_ids]
    )


def _revoke_from(message: kv_link_pb2.RevokeGrant) -> RevokeGrant:
    return RevokeGrant(handoff_from(message.handoff_id), message.ticket)


def _revoke_to(value: RevokeGrant) -> kv_link_pb2.RevokeGrant:
    return kv_link_pb2.RevokeGrant(handoff_id=handoff_to(value.handoff_id), ticket=value.ticket)


def _revoked_from(message: kv_link_pb2.Revoked) -> Revoked:
    return Revoked(handoff_from(message.handoff_id))


def _revoked_to(value: Revoked) -> kv_link_pb2.Revoked:
    return kv_link_pb2.Revoked(handoff_id=handoff_to(value.handoff_id))


def _done_from(message: kv_link_pb2.Done) -> Done:
    return Done(
        handoff_id=handoff_from(message.handoff_id),
        num_tokens=message.num_tokens,
        first_token=_first_token_from(message),
        digest=present(message, "digest", message.digest),
    )


def _first_token_from(message: kv_link_pb2.Done) -> FirstToken | None:
    if not message.HasField("first_token_id"):
        return None
    has_logprobs = message.HasField("first_token_logprobs")
    logprobs = logprobs_from(message.first_token_logprobs) if has_logprobs else None
    return FirstToken(message.first_token_id, logprobs)


def _done_to(value: Done) -> kv_link_pb2.Done:
    first = value.first_token
    logprobs = None if first is None else first.logprobs
    return kv_link_pb2.Done(
        handoff_id=handoff_to(value.handoff_id),
        num_tokens=value.num_tokens,
        first_token_id=None if first is None else first.token_id,
        first_token_logprobs=None if logprobs is None else logprobs_to(logprobs),
        digest=value.digest,
    )


def _failed_from(message: kv_link_pb2.Failed) -> Failed:
    return Failed(handoff_from(message.handoff_id), message.reason)


def _failed_to(value: Failed) -> kv_link_pb2.Failed:
    return kv_link_pb2.Failed(handoff_id=handoff_to(value.handoff_id), reason=value.reason)


def _closed_from(message: kv_link_pb2.Closed) -> Closed:
    return Closed(message.reason)


def _closed_to(value: Closed) -> kv_link_pb2.Closed:
    return kv_link_pb2.Closed(reason=value.reason)


def _writing_from(message: kv_link_pb2.Writing) -> Writing:
    digest = present(message, "digest", message.digest)
    return Writing(handoff_from(message.handoff_id), message.num_written, digest)


def _writing_to(value: Writing) -> kv_link_pb2.Writing:
    return kv_link_pb2.Writing(
        handoff_id=handoff_to(value.handoff_id),
        num_written=value.num_written,
        digest=value.digest,
    )


# Each codec accepts one message type, given by its key. mypy cannot express that.
FROM_MESSAGE: dict[str, Callable[[Any], LinkMessage]] = {
    "hello": _hello_from,
    "grant": _grant_from,
    "renew": _renew_from,
    "renewed": _renewed_from,
    "revoke_grant": _revoke_from,
    "revoked": _revoked_from,
    "done": _done_from,
    "failed": _failed_from,
    "closed": _closed_from,
    "writing": _writing_from,
}
TO_MESSAGE: dict[type[LinkMessage], tuple[str, Callable[[Any], Any]]] = {
    Hello: ("hello", _hello_to),
    Grant: ("grant", _grant_to),
    Renew: ("renew", _renew_to),
    Renewed: ("renewed", _renewed_to),
    RevokeGrant: ("revoke_grant", _revoke_to),
    Revoked: ("revoked", _revoked_to),
    Done: ("done", _done_to),
    Failed: ("failed", _failed_to),
    Closed: ("closed", _closed_to),
    Writing: ("writing", _writing_to),
}
