"""Settings of the dispatch: limits of retries, and circuit breakers of nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from baton.core.options import NETWORK, Option, check_options
from baton.router.routing.config import Routing

# Prefill returns a token in each attempt, so one token does not show that decode works.
MIN_PROGRESS_TOKENS = 2


@dataclass(slots=True)
class AttemptFailures:
    """Consecutive failures without progress. An attempt with progress resets them."""

    addresses: frozenset[str] = frozenset()
    num: int = 0
    is_paid: bool = True  # the last one made progress or is free: no retry budget needed

    def note(
        self, addresses: frozenset[str], num_new_tokens: int, *, is_free: bool, is_counted: bool
    ) -> None:
        has_progress = num_new_tokens >= MIN_PROGRESS_TOKENS
        if has_progress:
            self.addresses, self.num = frozenset(), 0
        self.addresses |= addresses
        self.num += is_counted
        self.is_paid = is_free or has_progress


class RetryBudget:
    """Token bucket: starts full with `most` retries, and each new request adds `share` of one.

    When full, it allows one retry for each request in flight, so that all survive the loss of a
    node.
    """

    def __init__(self, most: int, share: float = 0.2) -> None:
        self._most = float(most)
        self._share = share
        self._saved = self._most

    def note_request(self) -> None:
        self._saved = min(self._most, self._saved + self._share)

    def spend(self) -> bool:
        """Take one retry. Return whether one was left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    num_failures: int = 3  # consecutive failures after which a node is avoided
    first_pause_s: float = 0.5  # doubled with each further failure
    max_pause_s: float = 10.0


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    avoided_until_s: float = float("-inf")


class CircuitBreakers:
    """Circuit breakers by address. An avoided node gets one probe request after each pause."""

    def __init__(self, config: BreakerConfig = BreakerConfig()) -> None:
        self._config = config
        self._records: dict[str, _Record] = {}  # of nodes whose last request failed

    def avoided_addresses(self, now: float) -> frozenset[str]:
        return frozenset(
            address for address, record in self._records.items() if now < record.avoided_until_s
        )

    def note_sent(self, addresses: Iterable[str], now: float) -> None:
        """Restart the pauses of these nodes, so that only one request probes each."""
        for address in addresses:
            record = self._records.get(address)
            if record is not None:
                self._pause(record, now)

    def note_failure(self, addresses: Iterable[str], now: float) -> None:
        for address in addresses:
            record = self._records.setdefault(address, _Record())
            record.num_failures += 1
            self._pause(record, now)

    def note_success(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._records.pop(address, None)

    def _pause(self, record: _Record, now: float) -> None:
        beyond = record.num_failures - self._config.num_failures
        if beyond >= 0:
            doubled_s = self._config.first_pause_s * 2.0 ** min(beyond, 30)
            record.avoided_until_s = now + min(doubled_s, self._config.max_pause_s)


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """Settings of the dispatch of requests to nodes."""

    max_attempts: int = 3  # consecutive attempts without a new token
    node_patience_s: Annotated[
        float,
        Option(
            "Seconds that a request waits for a decode node if there is none; 0: fail at once.",
            NETWORK,
            default=5.0,
            at_least=0,
            is_setting=True,
        ),
    ] = 0.0
    quarantine_patience_s: float = 10.0  # how long it waits for nodes that are in quarantine
    retry_pause_s: float = 0.2  # before a node that has just failed is tried again
    routing: Routing = field(default_factory=Routing)
    breakers: BreakerConfig = field(default_factory=BreakerConfig)

    def __post_init__(self) -> None:
        check_options(self)
