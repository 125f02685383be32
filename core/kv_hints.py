"""Hints of a client about the KV of its request: how long to keep it, and in which order to evict.

Hints change no answer, only the time of later requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, NewType

from baton.core.errors import InvalidRequest
from baton.core.options import KV_HINTS, Option

Tenant = NewType("Tenant", bytes)

SHARED = Tenant(b"")  # the tenant of blocks without a cache salt, which all clients share
TENANT_BYTES = 8
MAX_SESSION_ID_CHARACTERS = 256
MAX_RETAIN_S = 86_400.0
MAX_PRIORITY = 100


def tenant_of(owner: str) -> Tenant:
    """Return the digest of a tenant's name, which is kept instead of it; SHARED if empty."""
    if not owner:
        return SHARED
    return Tenant(blake2b(owner.encode(), digest_size=TENANT_BYTES).digest())


@dataclass(frozen=True, slots=True)
class BlockHints:
    """Hints of a request about the blocks that it stores or uses."""

    tenant: Tenant = SHARED
    retain_s: float = 0.0  # from now on, during which the blocks are not evicted
    priority: int | None = None  # higher is kept longer; None: unchanged, or the default
    is_released: bool = False  # evict the blocks first
    is_in_session: bool = False  # a later request of the same session will use the blocks

    @property
    def is_wanted(self) -> bool:
        """True if the blocks are expected to be used again."""
        return not self.is_released and (self.is_in_session or self.retain_s > 0)

    @property
    def is_plain(self) -> bool:
        return not (self.is_wanted or self.is_released or self.priority is not None)


NO_HINTS = BlockHints()


@dataclass(frozen=True, slots=True)
class KvHints:
    """Validated on construction. Raises InvalidRequest, which names the field."""

    session_id: Annotated[
        str, Option("Id of the conversation: its KV is stored in files at once.", KV_HINTS)
    ] = ""
    retain_s: Annotated[
        float,
        Option(
            "Seconds for which tiers below the KV cache keep the KV of prompt and answer.", KV_HINTS
        ),
    ] = 0.0
    priority: Annotated[
        int | None,
        Option(
            "Priority of the KV in tiers, 0 to 100: lower ones are evicted first. Default: 35.",
            KV_HINTS,
            name="kv_priority",
        ),
    ] = None
    release: Annotated[
        bool, Option("Evict the KV first after the request.", KV_HINTS, flags=("--release",))
    ] = False
    prefetch: Annotated[
        bool,
        Option(
            "Load the KV of the prompt into the KV cache, and generate nothing.",
            KV_HINTS,
            flags=("--prefetch",),
        ),
    ] = False

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
RELEASED = KvHints(release=True)  # of KV that no other request can use: it is not stored in tiers
