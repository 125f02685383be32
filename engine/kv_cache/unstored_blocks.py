"""Blocks of the prefix cache that are to be stored outside: a line for each tenant. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from baton.core.ids import BlockId
from baton.core.kv_hints import BlockHints, Tenant
from baton.engine.kv_cache.block_hashes import BlockHash


class UnstoredBlock(NamedTuple):
    name: BlockHash
    block_id: BlockId
    hints: BlockHints


class UnstoredBlocks:
    """The blocks of a tenant are in order; tenants with blocks take turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Tenant, deque[UnstoredBlock]] = OrderedDict()  # next turn first

    def add(self, block: UnstoredBlock) -> None:
        self._lines.setdefault(block.hints.tenant, deque()).append(block)

    def take(self, may_store: Callable[[Tenant], bool]) -> UnstoredBlock | None:
        """Take the next block of those tenants that may store one."""
        tenant = self._next(may_store)
        if tenant is None:
            return None
        line = self._lines[tenant]
        block = line.popleft()
        if line:
            self._lines.move_to_end(tenant)
        else:
            del self._lines[tenant]
        return block

    def has_any(self, may_store: Callable[[Tenant], bool]) -> bool:
        return self._next(may_store) is not None

    def clear(self) -> None:
        self._lines.clear()

    def _next(self, may_store: Callable[[Tenant], bool]) -> Tenant | None:
        return next(filter(may_store, self._lines), None)
