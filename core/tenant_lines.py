"""Queue in which tenants take turns, so that none delays the others. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.core.kv_hints import Tenant

Item = TypeVar("Item")


def _anyone(_: Tenant) -> bool:
    return True


class TenantLines(Generic[Item]):
    """The items of a tenant are in order; tenants with items take turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Tenant, deque[Item]] = OrderedDict()  # the next turn first

    def add(self, tenant: Tenant, item: Item) -> None:
        self._lines.setdefault(tenant, deque()).append(item)

    def take(self, may_take: Callable[[Tenant], bool] = _anyone) -> Item | None:
        """Take the next item of those tenants that may have one."""
        tenant = self._next(may_take)
        if tenant is None:
            return None
        line = self._lines[tenant]
        item = line.popleft()
        if line:
            self._lines.move_to_end(tenant)
        else:
            del self._lines[tenant]
        return item

    def has_any(self, may_take: Callable[[Tenant], bool]) -> bool:
        return self._next(may_take) is not None

    def clear(self) -> None:
        self._lines.clear()

    def _next(self, may_take: Callable[[Tenant], bool]) -> Tenant | None:
        return next(filter(may_take, self._lines), None)
