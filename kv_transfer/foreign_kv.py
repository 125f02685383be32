"""The joint between the engine and KV on servers that are not Baton's: orders and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import BlockId

ForeignPullId = NewType("ForeignPullId", int)


@dataclass(frozen=True, slots=True)
class ForeignPull:
    """Fill these blocks with KV of a prompt, and then let the server release it."""

    pull_id: ForeignPullId
    kv: ForeignKv
    received_s: float  # when the router received the request: the server's lease is as old at least
    places: tuple[int, ...]  # of the blocks in the prompt, ascending
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class ForeignRelease:
    """Let the server release KV that is not needed."""

    kv: ForeignKv
    received_s: float  # as in a ForeignPull


ForeignOrder = ForeignPull | ForeignRelease


@dataclass(frozen=True, slots=True)
class ForeignPulled:
    """End of a pull. Nothing writes to its blocks any more."""

    pull_id: ForeignPullId
    are_filled: tuple[bool, ...]  # by block


class ForeignReader(Protocol):
    """Driver (`KvDriver`) that reads KV from foreign servers. Each pull must end."""

    def allows(self, kv: ForeignKv) -> bool:
        """Return whether the server is one that this node may dial. Any thread calls it."""
        ...

    def may_read(self, kv: ForeignKv, received_s: float, now: float) -> bool:
        """Return whether a pull that begins now would probably succeed."""
        ...
