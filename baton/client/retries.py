"""Connection settings of a client, and the retries of its calls: backoff, time limit, error."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field
from functools import lru_cache

import grpc
from grpc import StatusCode

from baton.core.errors import InvalidConfig, NamedError
from baton.rpc.router_address import unreachable
from baton.rpc.security.tls import TlsConfig, closed_connection, tls_trouble
from baton.rpc.security.token import authorization, check_token
from baton.rpc.status import RemoteError, remote_error

log = logging.getLogger(__name__)


class BatonError(NamedError):
    """The router refused or failed a call, or could not be reached."""

    def __init__(
        self,
        code: StatusCode,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
    ) -> None:
        names = code.name if reason == code.name else f"{code.name}, {reason}"
        super().__init__(f"{message} ({names})" if reason else message)
        self.code = code
        self.reason = reason  # for programs: INVALID_REQUEST, NO_NODES, TLS_FAILED and the like
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Retries:
    """Retry policy for calls that fail as UNAVAILABLE. Answers that have begun are final."""

    max_attempts: int = 3  # 1: no retry
    first_pause_s: float = 0.1  # doubled with each attempt; jitter takes off up to half of it
    max_pause_s: float = 2.0
    waits_when_full: bool = False  # when the router is full, wait for its retry_after_s

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidConfig(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if not 0 <= self.first_pause_s <= self.max_pause_s:
            raise InvalidConfig(
                f"first_pause_s is {self.first_pause_s}; it must be from 0 to max_pause_s "
                f"({self.max_pause_s})"
            )

    def pause_s(self, failure: RemoteError, num_failed: int, draw: float) -> float | None:
        """Return the pause before the next attempt, or None to give up. `draw` is from 0 to 1."""
        if num_failed >= self.max_attempts:
            return None
        if failure.code is StatusCode.RESOURCE_EXHAUSTED and self.waits_when_full:
            return failure.retry_after_s
        # The router may still hold the id of the previous attempt, whose end it has not noticed.
        is_id_still_in_use = num_failed > 1 and failure.code is StatusCode.ALREADY_EXISTS
        if failure.code is StatusCode.UNAVAILABLE or is_id_still_in_use:
            factor = 2.0 ** (num_failed - 1)
            full_pause_s = min(self.first_pause_s * factor, self.max_pause_s)
            return full_pause_s * (1 + draw) / 2
        return None


DEFAULT_RETRIES = Retries()


@dataclass(frozen=True, slots=True)
class Access:
    """Address, deadline, TLS, token and retries of a client."""

    address: str
    timeout_s: float | None
    tls: TlsConfig
    token: str | None = field(repr=False)
    retries: Retries

    def __post_init__(self) -> None:
        if self.tls.cert is not None and not self.tls.dials:
            raise InvalidConfig("a client with tls.cert also needs tls.ca, to verify the server")
        if self.token is not None:
            check_token(self.token, "the token")
            if not self.tls.dials:
                _warn_of_plain_text(self.address)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (authorization(self.token),)

    def tries(self, timeout_s: float | None = None) -> Tries:
        return Tries(self, self.timeout_s if timeout_s is None else timeout_s)


@lru_cache(maxsize=64)
def _warn_of_plain_text(address: str) -> None:
    """Log a warning once per address: calls with an operator's token have their own access."""
    log.warning("the token is sent to %s in plain text; set tls.ca", address)


class Tries:
    """Attempts of one call, with a common time limit."""

    def __init__(self, access: Access, timeout_s: float | None) -> None:
        self._access = access
        self._timeout_s = timeout_s
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0
        self.is_begun = False  # a part of the answer was received: no retry

    @property
    def remaining_s(self) -> float | None:
        """Time left for the call; None without a limit."""
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def failed(self, error: grpc.RpcError) -> float:
        """Return the pause before the next attempt. Raises BatonError if there is none."""
        self._num_failed += 1
        failure = remote_error(error)
        pause_s = self._access.retries.pause_s(failure, self._num_failed, random.random())
        remaining_s = self.remaining_s
        is_too_late = remaining_s is not None and pause_s is not None and pause_s >= remaining_s
        if pause_s is None or is_too_late or self.is_begun:
            raise self._error_of(failure) from error
        return pause_s

    def _error_of(self, failure: RemoteError) -> BatonError:
        if failure.reason is not None:
            return BatonError(failure.code, failure.reason, failure.message, failure.retry_after_s)
        if failure.code is StatusCode.UNAVAILABLE:
            return self._connection_error(failure)
        if failure.code is StatusCode.UNIMPLEMENTED:
            message = (
                f"{self._access.address} has no such RPC ({failure.message}); if it is a node, "
                "give the router's address"
            )
            return BatonError(failure.code, failure.code.name, message)
        if failure.code is StatusCode.DEADLINE_EXCEEDED and self._timeout_s is not None:
            message = f"no complete answer arrived within {self._timeout_s:g} s"
            return BatonError(failure.code, "DEADLINE_EXCEEDED", message)
        return BatonError(failure.code, failure.code.name, failure.message)

    def _connection_error(self, failure: RemoteError) -> BatonError:
        address, tls, details = self._access.address, self._access.tls, failure.message
        trouble = tls_trouble(address, tls, details)
        if trouble is not None:
            return BatonError(failure.code, "TLS_FAILED", trouble)
        message = closed_connection(address, tls, details) or unreachable(address, details)
        return BatonError(failure.code, "UNREACHABLE", message)
