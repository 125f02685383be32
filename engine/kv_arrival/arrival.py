"""KV from elsewhere, as one request sees it: what it may wait for, and what has arrived."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.foreign_kv import ForeignKv
from baton.core.request import PrefixSource, ReceiveKv
from baton.engine.kv_cache.held_kv import HeldKv

MAX_LOOKS = 8  # of a request for its prefix, after blocks that it had found were evicted


class GivenKv(NamedTuple):
    """KV on a foreign server that the client names."""

    kv: ForeignKv
    received_s: float  # when the router received the request


@dataclass(slots=True, eq=False)
class Arrival:
    """Record of one request. The scheduler and the sources of KV share it."""

    kv: HeldKv
    rank: tuple[float, ...]  # lower is scheduled earlier
    handoff: ReceiveKv | None = None  # None once its KV landed or was lost
    prefix_source: PrefixSource | None = None
    foreign_kv: GivenKv | None = None  # until it is pulled, or released
    waits_until_s: float | None = None  # for all fills in sum; None: it has not waited yet
    asked: set[str] = field(default_factory=set)  # sources that it does not ask again
    num_found_blocks: int = 0  # leading blocks that it found in the prefix cache while waiting
    num_looks: int = 0  # for its prefix, after the first one
    is_over: bool = False  # the request has ended
    counts_tokens: bool = True  # False: a preempted request could count its own blocks
    # Source of the tokens of each filled block: a tier, or a peer.
    source_by_range: dict[range, str] = field(default_factory=dict)

    @property
    def is_waiting(self) -> bool:
        """True if the request holds no blocks, so that it can wait for some."""
        return not (self.is_over or self.kv.block_tables)

    def may_wait(self, now: float) -> bool:
        return self.waits_until_s is None or now < self.waits_until_s

    def restart(self) -> None:
        """Let a request that has lost its blocks wait for what was stored of it."""
        self.asked.clear()
        self.waits_until_s = None

    def may_look_again(self, num_hits: int) -> bool:
        """Return whether blocks that the request had found were evicted while it waited."""
        num_found, self.num_found_blocks = self.num_found_blocks, num_hits
        if num_hits >= num_found or self.num_looks >= MAX_LOOKS:
            return False
        self.num_looks += 1
        self.asked.clear()
        return True

    def note_filled(self, source: str, token_range: range) -> None:
        """Note the source of a block, unless the request has begun without it."""
        if self.counts_tokens and self.is_waiting:
            self.source_by_range[token_range] = source

    def tokens_by_source(self, num_cached: int) -> dict[str, int]:
        """Return where the first `num_cached` tokens came from, without those computed here."""
        if not self.source_by_range:
            return {}
        num_tokens: Counter[str] = Counter()
        for token_range, source in self.source_by_range.items():
            if token_range.start < num_cached:
                num_tokens[source] += min(token_range.stop, num_cached) - token_range.start
        return dict(num_tokens)
