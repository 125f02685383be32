"""Rate limits per client: requests at a time, requests and tokens per minute. Pure.

A client is a token of `--token-file`; without authentication all clients are one. Limits per minute
are token buckets: a minute's worth can be used at once and returns continuously. Tokens are counted
as they are computed, so a client can overdraw its limit by the requests in progress, and waits for
longer then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from baton.core.options import SECURITY, Option, check_options
from baton.rpc.errors import RateLimited

MINUTE_S = 60.0
# Requests in progress end at unknown times.
CONCURRENCY_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class RateLimitConfig:
    """Limits of each client. None: no limit."""

    client_max_requests: Annotated[
        int | None,
        Option(
            "Maximum number of requests in progress per client token.",
            SECURITY,
            at_least=1,
            is_setting=True,
        ),
    ] = None
    client_requests_per_minute: Annotated[
        int | None,
        Option(
            "Maximum number of requests per client token and minute.",
            SECURITY,
            at_least=1,
            is_setting=True,
        ),
    ] = None
    client_tokens_per_minute: Annotated[
        int | None,
        Option(
            "Maximum number of prompt and answer tokens per client token and minute.",
            SECURITY,
            at_least=1,
            is_setting=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)


NO_RATE_LIMITS = RateLimitConfig()


@dataclass(frozen=True, slots=True)
class Allowance:
    """State of a limit per minute."""

    limit: int
    remaining: int
    reset_s: float  # until all of it is there again


class Bucket:
    """Limit per minute, which refills continuously."""

    def __init__(self, limit: int, now: float) -> None:
        self._limit = limit
        self._level = float(limit)
        self._measured_s = now

    def take(self, count: int, now: float) -> None:
        """Take more than there is if need be."""
        self._level = self._level_at(now) - count
        self._measured_s = now

    def wait_s(self, now: float) -> float:
        """Return the time until there is at least one."""
        return max(0.0, 1 - self._level_at(now)) * MINUTE_S / self._limit

    def allowance(self, now: float) -> Allowance:
        level = self._level_at(now)
        reset_s = (self._limit - level) * MINUTE_S / self._limit
        return Allowance(self._limit, max(0, int(level)), reset_s)

    def _level_at(self, now: float) -> float:
        refilled = (now - self._measured_s) * self._limit / MINUTE_S
        return min(float(self._limit), self._level + refilled)


class ClientUsage:
    """Usage of one client."""

    def __init__(self, config: RateLimitConfig, clock: Callable[[], float]) -> None:
        now = clock()
        requests, tokens = config.client_requests_per_minute, config.client_tokens_per_minute
        self._clock = clock
        self._max_requests = config.client_max_requests
        self._num_in_progress = 0
        self._requests = None if requests is None else Bucket(requests, now)
        self._tokens = None if tokens is None else Bucket(tokens, now)

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Count a request until the end of the block. Raises RateLimited."""
        self._check()
        if self._requests is not None:
            self._requests.take(1, self._clock())
        self._num_in_progress += 1
        try:
            yield
        finally:
            self._num_in_progress -= 1

    def note_tokens(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens.take(count, self._clock())

    def allowances(self) -> dict[str, Allowance]:
        """Return the state of each limit per minute, by what it limits."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        now = self._clock()
        return {name: one.allowance(now) for name, one in buckets.items() if one is not None}

    def _check(self) -> None:
        if self._max_requests is not None and self._num_in_progress >= self._max_requests:
            raise RateLimited(
                f"this client has {self._num_in_progress} requests in progress, which is its "
                "limit; wait for one to end",
                CONCURRENCY_RETRY_AFTER_S,
            )
        now = self._clock()
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            wait_s = 0.0 if bucket is None else bucket.wait_s(now)
            if bucket is not None and wait_s > 0:
                raise RateLimited(
                    f"this client has used its {bucket.allowance(now).limit} {name} per minute; "
                    f"try again in {wait_s:.1f} s",
                    wait_s,
                )


class RateLimits:
    """Usage of all clients. Their number is that of the accepted tokens."""

    def __init__(self, config: RateLimitConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._clients: dict[str, ClientUsage] = {}

    def of(self, client: str) -> ClientUsage:
        usage = self._clients.get(client)
        if usage is None:
            usage = self._clients[client] = ClientUsage(self._config, self._clock)
        return usage
