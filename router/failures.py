"""What went wrong in the tries to serve one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Prefill gives a token in each try: one alone does not show that decode works.
LEAST_PROGRESS = 2


@dataclass(slots=True)
class Failures:
    """Those in a row that brought the answer no further; a try that did is a new beginning."""

    addresses: frozenset[str] = frozenset()
    num: int = 0
    is_paid: bool = True  # the last one cost the nodes nothing, or was worth it

    def note(self, addresses: frozenset[str], num_new_tokens: int, *, is_free: bool) -> None:
        has_progress = num_new_tokens >= LEAST_PROGRESS
        if has_progress:
            self.addresses, self.num = frozenset(), 0
        self.addresses |= addresses
        self.num += not is_free
        self.is_paid = is_free or has_progress
