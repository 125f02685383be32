"""Limits of retries: failed attempts of one request, and a budget over all requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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
