"""Circuit breakers: avoid nodes that failed repeatedly and probe them periodically. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
