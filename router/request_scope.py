"""Scope of a request from its arrival to its end, and its context in the pipeline."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from grpc import aio

from baton.core.kv_hints import RELEASED
from baton.router.admission.rate_limits import (
    NO_RATE_LIMITS,
    ClientUsage,
    RateLimitConfig,
    RateLimits,
)
from baton.router.dispatch.quarantine import PromptGroup
from baton.router.fair_slots import turn_name
from baton.router.input_processing.limits import LogprobBudget, is_valid_name
from baton.router.routing.served_models import Node
from baton.router.tracing import NO_REQUEST_TRACING, UNTRACED, RequestTrace, Tracing
from baton.router.values import GenerateCall, TokenPrompt
from baton.rpc.errors import DeadlineExceeded
from baton.rpc.security.token import HEADER
from baton.rpc.status import HasDeadline, is_late
from baton.telemetry import names
from baton.telemetry.tracing.tracer import Received

ID_BYTES = 12
NONCE_BYTES = 16
CLIENT_BYTES = 8


class RequestScope:
    """Scope of one answer; traces and counts it once."""

    def __init__(
        self,
        tracing: Tracing,
        context: RequestContext,
        owner: str,
        call: HasDeadline | None,
        usage: ClientUsage | None,
        address: str = "",
    ) -> None:
        self.usage = usage  # of the client; None: nothing is limited
        self.context = context
        self._tracing = tracing
        self._trace = context.trace
        self._owner = owner  # empty without authentication
        self._call = call  # None: it has no deadline
        self._address = address  # host of the call; empty: not known

    @property
    def trace_id(self) -> str:
        """Empty if the request is not traced."""
        return self._trace.trace_id

    @property
    def owner(self) -> str:
        """Digest of the client's token; empty without authentication."""
        return self._owner

    @property
    def client(self) -> str:
        """Name by which the client takes turns."""
        return self.context.client

    def note_documents_read(self, warnings: Sequence[str]) -> None:
        """Record that documents have become text, with warnings for all answers."""
        self._trace.note_documents_read()
        self.context = replace(self.context, warnings=(*self.context.warnings, *warnings))

    @contextmanager
    def ending_on_error(self) -> Iterator[None]:
        """End the request's trace if the block, which parses the request, raises."""
        try:
            yield
        except BaseException:
            with self._trace.ending(self._is_late):
                raise

    @contextmanager
    def within_limits(self) -> Iterator[None]:
        """Count the request in the client's limits until the block ends. Raises RateLimited."""
        with ExitStack() as admitted:
            with self.ending_on_error():
                if self.usage is not None:
                    admitted.enter_context(self.usage.admitting())
            yield

    @contextmanager
    def answering(self, call: GenerateCall) -> Iterator[GenerateCall]:
        """Yield the call with its salt bound to the client. The request ends with the block."""
        with self._trace.ending(self._is_late):
            self._trace.note_call(call)
            client = client_of(self._owner, call.cache_salt, self._address)
            call = replace(call, client=client)
            salt = bind_salt(call.cache_salt, self._owner)
            if call.foreign_kv is not None:
                salt = private_salt(self._owner)
                call = replace(call, kv_hints=RELEASED)
            if salt != call.cache_salt:
                call = replace(call, cache_salt=salt, tenant=self._owner)
            yield call

    def begin_child(self, request_id: str) -> RequestScope:
        """Begin the scope of another answer to the same client request, in the same trace."""
        metadata = [(names.TRACEPARENT, self._trace.traceparent)]
        now = time.monotonic()
        trace = self._tracing.begin(metadata, request_id, now)
        context = replace(self.context, received_s=now, trace=trace)
        return RequestScope(
            self._tracing, context, self._owner, self._call, self.usage, self._address
        )

    def _is_late(self) -> bool:
        """Return whether the deadline has passed, within a tolerance."""
        return self._call is not None and is_late(self._call, self.context.received_s)


class RequestScopes:
    """Creates the scopes of requests.

    With `by_token`, cache salts are bound to the client's token, so tenants never share KV, and
    each token has rate limits of its own.
    """

    def __init__(
        self,
        tracing: Tracing = NO_REQUEST_TRACING,
        *,
        by_token: bool = False,
        rate_limits: RateLimitConfig = NO_RATE_LIMITS,
    ) -> None:
        self._tracing = tracing
        self._limits = None
        if rate_limits != NO_RATE_LIMITS:
            self._limits = RateLimits(rate_limits, time.monotonic)
        self._by_token = by_token

    def begin(
        self,
        request_id: str,
        metadata: Received | None,
        call: HasDeadline | None = None,
        address: str = "",
    ) -> RequestScope:
        """Begin the scope of a request that arrives now, by a call that may have a deadline.

        `address` is the host that calls, if it is known.
        """
        now = time.monotonic()
        remaining_s = None if call is None else call.time_remaining()
        owner = "" if metadata is None else self.owner_of(metadata)
        trace = self._tracing.begin(metadata, request_id, now)
        deadline_s = None if remaining_s is None else now + remaining_s
        usage = None if self._limits is None else self._limits.of(owner)
        context = RequestContext(now, deadline_s, trace, client=turn_name(owner, address))
        if usage is not None:
            context = replace(context, note_tokens=usage.note_tokens)
        return RequestScope(self._tracing, context, owner, call, usage, address)

    def begin_call(
        self, client_id: str, context: aio.ServicerContext[Any, Any]
    ) -> tuple[str, RequestScope]:
        """Begin the scope of a gRPC call. Returns it after the client's id, or a new valid one."""
        request_id = client_id if is_valid_name(client_id) else secrets.token_hex(ID_BYTES)
        host = host_of_peer(context.peer())
        return request_id, self.begin(request_id, context.invocation_metadata(), context, host)

    def admitting(self, owner: str) -> AbstractContextManager[None]:
        """Count a request that generates nothing until the end of the block.

        Entering raises RateLimited.
        """
        return nullcontext() if self._limits is None else self._limits.of(owner).admitting()

    def owner_of(self, metadata: Received) -> str:
        """Return the digest of the client's token; empty without authentication."""
        return token_digest(metadata) if self._by_token else ""


def token_digest(metadata: Received) -> str:
    """Return the hash of the client's token; empty without a token."""
    header = next((value for key, value in metadata if key == HEADER), "")
    token = (header.decode() if isinstance(header, bytes) else header).partition(" ")[2].strip()
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def client_of(owner: str, salt: str, address: str) -> str:
    """Return an opaque id of a client: of its token, else of its salt, else of its address."""
    kinds = ("token", owner), ("salt", salt), ("address", address)
    kind, name = next((each for each in kinds if each[1]), ("", ""))
    if not name:
        return ""
    return hashlib.blake2b(f"{kind}:{name}".encode(), digest_size=CLIENT_BYTES).hexdigest()


def host_of_peer(peer: str) -> str:
    """Return the host in gRPC's name of a peer, such as `ipv4:127.0.0.1:50123`."""
    return peer.rpartition(":")[0]


def private_salt(owner: str) -> str:
    """Return a salt that no other request has.

    A client alone says that KV on a foreign server is that of its prompt. So no other request may
    hit it.
    """
    return f"{owner}!{secrets.token_hex(NONCE_BYTES)}"


def bind_salt(salt: str, owner: str) -> str:
    """Bind a salt to its owner. Requests without a salt share KV with all others without one.

    A salt without an owner is marked as such: it cannot spell that of a client with a token, which
    another router of the same nodes has bound.
    """
    return f"{owner}:{salt}" if salt else ""


@dataclass(frozen=True, slots=True)
class PromptPlacement:
    """Decode node of a prompt that several answers share."""

    prompt: TokenPrompt
    decode: Node
    cache_salt: str  # of the KV
    has_kv: bool = False  # it has the KV of the whole prompt


def _ignore_count(count: int) -> None:
    """Drop the number: nothing is limited."""


def _ignore(placement: PromptPlacement) -> None:
    """Drop the placement: no other answer needs it."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Context of a request in the pipeline: deadline, trace, and links to answers to its prompt."""

    received_s: float
    deadline_s: float | None = None  # on the same clock; None: no deadline
    trace: RequestTrace = UNTRACED
    client: str = ""  # name by which it takes turns
    logprob_budget: LogprobBudget | None = None  # of the whole client request; None: separate
    quarantine_group: PromptGroup | None = None  # of all answers to the prompt; None: separate
    # Of the prompt, by another answer. The request keeps to its model revision, and uses the node
    # if that has the KV and room.
    placement: PromptPlacement | None = None
    # Called when nodes are chosen, and again when the decode node has the KV.
    note_placement: Callable[[PromptPlacement], None] = _ignore
    warnings: tuple[str, ...] = ()  # about the whole client request: what is done only in part
    note_tokens: Callable[[int], None] = _ignore_count  # called with numbers of computed tokens

    def remaining_s(self, now: float) -> float | None:
        """Return the time until the deadline. Raises DeadlineExceeded if it has passed."""
        if self.deadline_s is None:
            return None
        if now >= self.deadline_s:
            raise DeadlineExceeded("the client's deadline passed before the answer was complete")
        return self.deadline_s - now
