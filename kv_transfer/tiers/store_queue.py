"""Blocks that wait to be copied to host memory: a line for each tenant. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

from baton.core.ids import BlockId, BlockName
from baton.core.kv_hints import NO_HINTS, BlockHints, Tenant
from baton.kv_transfer.external_kv import Store


@dataclass(slots=True)
class Storing:
    """A store in progress. It ends with the last of its blocks."""

    store: Store
    generation: int
    ordered_s: float
    num_left: int  # blocks


@dataclass(frozen=True, slots=True)
class StoringBlock:
    storing: Storing
    name: BlockName
    block_id: BlockId
    hints: BlockHints


class StoreQueue:
    """Lines in which blocks are in the order of their stores. Tenants take turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Tenant, deque[StoringBlock]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Tenants with waiting blocks. The one that waits longest for its turn is the first."""
        return tuple(self._lines)

    def num_waiting(self, tenant: Tenant) -> int:
        return len(self._lines.get(tenant, ()))

    def add(self, storing: Storing) -> None:
        store = storing.store
        hints = store.hints or (NO_HINTS,) * len(store.names)
        for each in zip(store.names, store.block_ids, hints, strict=True):
            block = StoringBlock(storing, *each)
            self._lines.setdefault(block.hints.tenant, deque()).append(block)

    def take(self, tenant: Tenant) -> StoringBlock:
        """Take the first block of a tenant that has one."""
        block = self._lines[tenant].popleft()
        self._remove_if_empty(tenant)
        return block

    def take_last(self, tenant: Tenant) -> StoringBlock:
        block = self._lines[tenant].pop()
        self._remove_if_empty(tenant)
        return block

    def put_back(self, block: StoringBlock) -> None:
        """Make a block that was just taken the first one of its tenant again."""
        self._lines.setdefault(block.hints.tenant, deque()).appendleft(block)

    def end_turn(self, tenant: Tenant) -> None:
        if tenant in self._lines:
            self._lines.move_to_end(tenant)

    def drop(self, names: Collection[BlockName]) -> list[StoringBlock]:
        """Take the blocks of these names."""
        dropped = [block for line in self._lines.values() for block in line if block.name in names]
        if dropped:
            for tenant, line in list(self._lines.items()):
                self._lines[tenant] = deque(block for block in line if block.name not in names)
                self._remove_if_empty(tenant)
        return dropped

    def _remove_if_empty(self, tenant: Tenant) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]
