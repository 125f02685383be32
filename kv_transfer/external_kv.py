"""The joint between the engine and KV caches outside its own memory.

A cache of this kind is asked which blocks it holds, copies blocks into and out of the KV memory of
the node, and reports what has ended. Blocks are named as in the prefix cache: a name stands for the
tokens of a block, all tokens before it, the model and the KV group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from baton.core.errors import InvalidRequest
from baton.core.ids import BlockId, BlockName
from baton.core.kv_hints import BlockHints

LoadId = NewType("LoadId", int)
StoreId = NewType("StoreId", int)

# The KV cache itself, and tiers below it.
KV, HOST, FILE, OBJECT = TIERS = ("kv", "host", "file", "object")


def check_tiers(names: Iterable[str]) -> None:
    """Raises InvalidRequest for a name that is not in TIERS."""
    for name in names:
        if name not in TIERS:
            raise InvalidRequest(f"tier {name!r}: choose from {', '.join(TIERS)}", "tiers")


@dataclass(frozen=True, slots=True)
class Load:
    """Copy these blocks into the KV memory. The engine does not use the block ids until then."""

    load_id: LoadId
    names: tuple[BlockName, ...]
    block_ids: tuple[BlockId, ...]
    request_id: str = ""  # that waits for it, for telemetry; empty: for a peer


@dataclass(frozen=True, slots=True)
class Store:
    """Copy these blocks out of the KV memory. They do not change until the store has ended."""

    store_id: StoreId
    names: tuple[BlockName, ...]
    block_ids: tuple[BlockId, ...]
    hints: tuple[BlockHints, ...] = ()  # one for each block; empty: no hints


@dataclass(frozen=True, slots=True)
class Use:
    """A request used these blocks, the least important one first, and gave hints about them."""

    names: tuple[BlockName, ...]
    hints: BlockHints


@dataclass(frozen=True, slots=True)
class ExternalOrders:
    """Orders of one engine step."""

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    drops: tuple[BlockName, ...] = ()  # their KV may be wrong: never load them again
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """End of a load. A block without a source was not loaded; the engine computes its tokens."""

    load_id: LoadId
    sources: tuple[str | None, ...]  # by block: the tier that it came from, such as "host"


@dataclass(frozen=True, slots=True)
class ExternalReports:
    """Ends of loads and stores since the last poll, each exactly once."""

    loaded: tuple[Loaded, ...] = ()
    stored: tuple[StoreId, ...] = ()  # successful or not: the blocks are no longer read


@dataclass(frozen=True, slots=True)
class HeldChanges:
    """Names that a cache has gained and lost. A name that came and went is in neither."""

    added: tuple[BlockName, ...] = ()
    removed: tuple[BlockName, ...] = ()


NO_ORDERS = ExternalOrders()
NO_EXTERNAL_REPORTS = ExternalReports()
NO_HELD_CHANGES = HeldChanges()


class ExternalKv(Protocol):
    """A KV cache outside the engine. The engine thread calls it, so no method may block."""

    def holds(self, name: BlockName) -> bool:
        """Return whether a load of this block would probably succeed."""
        ...

    def load_s(self, names: Sequence[BlockName]) -> float:
        """Return an estimate of the seconds that a load of these blocks takes."""
        ...

    def clear(self, tiers: Collection[str] | None = None) -> Mapping[str, int]:
        """Forget all blocks of these tiers, or of all, and return how many each had.

        Stores in progress are not kept either.
        """
        ...
