"""Hints of a client about the KV of its request: how long to keep it, and in which order to evict.

Hints change no answer, only the time of later requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from errors import InvalidRequest
from kv_transfer.external_kv import BlockHints, tenant_of

MAX_SESSION_ID_CHARACTERS = 256
MAX_RETAIN_S = 86_400.0
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class KvHints:
    """Validated on construction. Raises InvalidRequest, which names the field."""

    session_id: str = ""  # of a conversation or an agent; empty: none
    retain_s: float = 0.0  # how long tiers keep the KV after the request
    priority: int | None = None  # of the KV in tiers, 0 to 100: higher is kept longer
    release: bool = False  # evict the KV first once the request has ended
    prefetch: bool = False  # load the prompt's KV into the KV cache, and generate nothing

    def __post_init__(self) -> None:
        num_characters = len(self.session_id)
        if num_characters > MAX_SESSION_ID_CHARACTERS:
            raise InvalidRequest(
                f"kv_hints.session_id has {num_characters} characters; at most "
                f"{MAX_SESSION_ID_CHARACTERS} are allowed",
                "kv_hints.session_id",
            )
        if not 0 <= self.retain_s <= MAX_RETAIN_S:
            raise InvalidRequest(
                f"kv_hints.retain_s is {self.retain_s}; it must be from 0 to {MAX_RETAIN_S:.0f}",
                "kv_hints.retain_s",
            )
        if self.priority is not None and not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"kv_hints.priority is {self.priority}; it must be from 0 to {MAX_PRIORITY}",
                "kv_hints.priority",
            )
        if self.release and (self.retain_s or self.prefetch):
            raise InvalidRequest(
                "kv_hints.release contradicts retain_s and prefetch: leave out one of them",
                "kv_hints.release",
            )

    def block_hints(self, owner: str) -> BlockHints:
        """Return the hints for blocks of a tenant, whose name is not kept."""
        return BlockHints(
            tenant_of(owner),
            self.retain_s,
            self.priority,
            is_released=self.release,
            is_in_session=bool(self.session_id),
        )


NO_KV_HINTS = KvHints()
