"""Budget for retries, so that an outage does not multiply the load. Pure."""

from __future__ import annotations

from errors import InvalidConfig


class RetryBudget:
    """Token bucket: starts full with `most` retries, and each new request adds `share` of one.

    When full, it allows one retry for each request in flight, so that all survive the loss of a
    node.
    """

    def __init__(self, most: int, share: float = 0.2) -> None:
        if most < 1 or share < 0:
            raise InvalidConfig(f"retry budget {most} and share {share} must be at least 1 and 0")
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
