"""Conversion between protobuf messages and values of the KV control link. Pure."""

from __future__ import annotations

from typing import Any

from baton.core.logprobs import FirstToken
from baton.kv_transfer.protocol.messages import (
    Closed,
    Done,
    Failed,
    Grant,
    Hello,
    LinkMessage,
    Renew,
    Renewed,
    Revoked,
    RevokeGrant,
    Writing,
)
from baton.rpc.messages.conversion import logprobs_from, logprobs_to
from baton.rpc.messages.mapper import Mapper
from baton.v1 import kv_link_pb2

# A Done's first token is two fields of the message.
FIRST_TOKEN = ("first_token", "first_token_id", "first_token_logprobs")
# By the name of the message in LinkMessage. mypy cannot express that each has types of its own.
MAPPERS: dict[str, Mapper[Any, Any]] = {
    "hello": Mapper(Hello, kv_link_pb2.Hello),
    "grant": Mapper(Grant, kv_link_pb2.Grant),
    "renew": Mapper(Renew, kv_link_pb2.Renew),
    "renewed": Mapper(Renewed, kv_link_pb2.Renewed),
    "revoke_grant": Mapper(RevokeGrant, kv_link_pb2.RevokeGrant),
    "revoked": Mapper(Revoked, kv_link_pb2.Revoked),
    "done": Mapper(Done, kv_link_pb2.Done, unmapped=FIRST_TOKEN),
    "failed": Mapper(Failed, kv_link_pb2.Failed),
    "closed": Mapper(Closed, kv_link_pb2.Closed),
    "writing": Mapper(Writing, kv_link_pb2.Writing),
}
NAME_BY_KIND: dict[type[LinkMessage], str] = {
    mapper.value: name for name, mapper in MAPPERS.items()
}


def link_message_from(message: kv_link_pb2.LinkMessage) -> LinkMessage | None:
    """Return the value, or None for a message type that only a newer peer knows."""
    kind = message.WhichOneof("message")
    if kind is None:
        return None
    others: dict[str, Any] = {}
    if kind == "done":
        others["first_token"] = _first_token_from(message.done)
    value: LinkMessage = MAPPERS[kind].from_message(getattr(message, kind), **others)
    return value


def link_message_to(value: LinkMessage) -> kv_link_pb2.LinkMessage:
    others = _first_token_to(value.first_token) if isinstance(value, Done) else {}
    name = NAME_BY_KIND[type(value)]
    return kv_link_pb2.LinkMessage(**{name: MAPPERS[name].to_message(value, **others)})


def _first_token_from(message: kv_link_pb2.Done) -> FirstToken | None:
    if not message.HasField("first_token_id"):
        return None
    has_logprobs = message.HasField("first_token_logprobs")
    logprobs = logprobs_from(message.first_token_logprobs) if has_logprobs else None
    return FirstToken(message.first_token_id, logprobs)


def _first_token_to(token: FirstToken | None) -> dict[str, Any]:
    """Return the fields of a Done that hold the token: none of them in a pull."""
    if token is None:
        return {}
    logprobs = None if token.logprobs is None else logprobs_to(token.logprobs)
    return {"first_token_id": token.token_id, "first_token_logprobs": logprobs}
