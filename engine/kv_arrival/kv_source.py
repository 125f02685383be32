"""Interface of a source of KV: it offers to fill blocks, and orders the fill that was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from baton.core.ids import NodeId
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fill, FillId
from baton.engine.kv_cache.external_prefix import ExternalPrefix
from baton.kv_transfer.types import KvReports


class PrefixNeed(NamedTuple):
    """Prefix that a request can use, and what it costs to get it in another way."""

    max_num_tokens: int
    token_s: float | None  # to compute a token, or to receive it in a hand-off; None: unknown
    now_s: float
    num_spare: int  # blocks that a fill leaves free for other requests
    # Set if a hand-off brings the rest: the argument of `KvCache.find_prefix`, and its result.
    continues_at: int | None = None
    num_hits: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """Fill that saves time."""

    source: KvSource
    prefix: ExternalPrefix
    saved_s: float  # compared with the other way to get the tokens
    peer: NodeId | None = None  # of `Fill`
    follows: Fill | None = None  # in progress: waiting for it is enough, or comes first


class KvSource(Protocol):
    """KV caches outside this engine of one kind. They must not block and are never trusted."""

    name: str  # of `Arrival.asked`

    def offer(self, arrival: Arrival, need: PrefixNeed, min_saved_s: float) -> Offer | None:
        """Return the fill that makes the prefix longest, or None.

        A fill that can never save time is noted in `Arrival.asked`. For any other reason, such as
        too few free blocks, the source is asked again.
        """
        ...

    def order(self, fill: Fill) -> None:
        """Order a fill that has begun."""
        ...

    def settle(self, reports: KvReports, now: float) -> list[FillId]:
        """Apply the reports of its fills, and return those that have ended."""
        ...
