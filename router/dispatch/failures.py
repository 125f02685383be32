"""Failed attempts of one request. Pure."""

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

    def note(self, addresses: frozenset[str], num_new_tokens: int, *, is_free: bool) -> None:
        has_progress = num_new_tokens >= MIN_PROGRESS_TOKENS
        if has_progress:
            self.addresses, self.num = frozenset(), 0
        self.addresses |= addresses
        self.num += not is_free
        self.is_paid = is_free or has_progress
