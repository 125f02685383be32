"""When a client tries a call again, how long it waits first, and what it says in the end."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import grpc
from grpc import StatusCode

from engine.errors import InvalidConfig
from serving.errors import ServiceError
from serving.router_address import unreachable
from serving.status import RemoteError, remote_error
from serving.tls import TlsConfig
from serving.tls_trouble import PROBE_TIMEOUT_S, tls_trouble


class BatonError(ServiceError):
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
        self.retry_after_s = retry_after_s  # when the router told how long to wait


@dataclass(frozen=True, slots=True)
class Retries:
    """Of calls that failed as UNAVAILABLE. An answer that has begun is never asked for again."""

    max_attempts: int = 3  # 1: no second try
    first_pause_s: float = 0.1  # doubled each time; a random half of it is left out
    longest_pause_s: float = 2.0
    waits_when_full: bool = False  # whether to wait for as long as a full router asks

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidConfig(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if not 0 <= self.first_pause_s <= self.longest_pause_s:
            raise InvalidConfig(
                f"first_pause_s is {self.first_pause_s}; it must be from 0 to longest_pause_s "
                f"({self.longest_pause_s})"
            )

    def pause_s(self, failure: RemoteError, num_failed: int, draw: float) -> float | None:
        """Before the next try, for a draw from 0 to 1; None when there is none."""
        if num_failed >= self.max_attempts:
            return None
        if failure.code is StatusCode.RESOURCE_EXHAUSTED and self.waits_when_full:
            return failure.retry_after_s
        # A router that has not noticed yet that the broken try is over still holds its id.
        is_own_id_in_use = num_failed > 1 and failure.code is StatusCode.ALREADY_EXISTS
        if failure.code is StatusCode.UNAVAILABLE or is_own_id_in_use:
            doubled = 2.0 ** (num_failed - 1)
            whole_s = min(self.first_pause_s * doubled, self.longest_pause_s)
            return whole_s * (1 + draw) / 2
        return None


FEW = Retries()


class Tries:
    """The tries of one call, which share one time limit."""

    def __init__(
        self, address: str, tls: TlsConfig, retries: Retries, timeout_s: float | None
    ) -> None:
        self._address = address
        self._tls = tls
        self._retries = retries
        self._timeout_s = timeout_s
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0
        self.is_begun = False  # a part of the answer was seen: it is not asked for again

    @property
    def remaining_s(self) -> float | None:
        """None: no limit."""
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def failed(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next try. Raises BatonError when there is none.

        May wait for the server in order to find out what is wrong.
        """
        self._num_failed += 1
        failure = remote_error(error)
        trouble = self._tls_trouble(failure)
        if trouble is not None:
            raise BatonError(failure.code, "TLS_FAILED", trouble) from error
        pause_s = self._retries.pause_s(failure, self._num_failed, random.random())
        remaining_s = self.remaining_s
        is_too_late = remaining_s is not None and pause_s is not None and pause_s >= remaining_s
        if pause_s is None or is_too_late or self.is_begun:
            raise self._named(failure) from error
        return pause_s

    def _named(self, failure: RemoteError) -> BatonError:
        if failure.reason is not None:
            return BatonError(failure.code, failure.reason, failure.message, failure.retry_after_s)
        if failure.code is StatusCode.UNAVAILABLE:
            message = unreachable(self._address, failure.message)
            return BatonError(failure.code, "UNREACHABLE", message)
        if failure.code is StatusCode.UNIMPLEMENTED:
            message = (
                f"{self._address} has no such call ({failure.message}); if it is a node, give the "
                "router's address"
            )
            return BatonError(failure.code, failure.code.name, message)
        if failure.code is StatusCode.DEADLINE_EXCEEDED and self._timeout_s is not None:
            message = f"no whole answer came within {self._timeout_s:g} s"
            return BatonError(failure.code, "DEADLINE_EXCEEDED", message)
        return BatonError(failure.code, failure.code.name, failure.message)

    def _tls_trouble(self, failure: RemoteError) -> str | None:
        """Only a connection that broke off can have failed by it; refusals have their reasons."""
        is_refusal = failure.code is not StatusCode.UNAVAILABLE or failure.reason is not None
        if is_refusal or self.is_begun:
            return None
        remaining_s = self.remaining_s
        patience_s = PROBE_TIMEOUT_S if remaining_s is None else min(PROBE_TIMEOUT_S, remaining_s)
        return tls_trouble(self._address, self._tls, patience_s) if patience_s > 0 else None
