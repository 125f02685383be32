"""How many tries beyond the first there may be: an outage must not double the load. Pure."""

from __future__ import annotations

from engine.errors import InvalidConfig


class RetryBudget:
    """Each request that comes saves a share of a retry, up to `most`; it begins full.

    Full, it holds a retry for every request under way, so that all survive the death of one node.
    """

    def __init__(self, most: int, share: float = 0.2) -> None:
        if most < 1 or share < 0:
            raise InvalidConfig(f"a budget of {most} retries and a share of {share} is none")
        self._most = float(most)
        self._share = share
        self._saved = self._most

    def request_came(self) -> None:
        self._saved = min(self._most, self._saved + self._share)

    def spend(self) -> bool:
        """Whether there was one left."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
