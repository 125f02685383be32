"""Names of a node's adapters: the last order about each. Pure."""

from __future__ import annotations

from collections import OrderedDict

from baton.core.errors import InvalidRequest
from baton.core.ids import AdapterRef
from baton.rpc.errors import OutdatedOrder
from baton.rpc.node_info import NameOrder

MAX_UNLOADED = 1_024  # names remembered
MAX_AHEAD_NS = 24 * 3600 * 10**9  # of the node's clock


class AdapterNames:
    """Last order of each name.

    Routers number their orders, each higher than all that they know of. An order that is lower than
    the last one of its name comes too late: it was delayed, or is from a router that did not know
    of the later one. Unloads are remembered as well, so that no late load revives a name. The last
    order wins everywhere; of two routers' orders with one number, the one with the higher id.
    """

    def __init__(self, max_unloaded: int = MAX_UNLOADED) -> None:
        self._max_unloaded = max_unloaded
        self.loaded: dict[str, NameOrder] = {}
        self.unloaded: OrderedDict[str, NameOrder] = OrderedDict()  # the oldest order first

    def find(self, name: str) -> AdapterRef | None:
        order = self.loaded.get(name)
        return None if order is None else order.adapter

    def last(self, name: str) -> NameOrder:
        """Return the last order; that of generation 0 is not known."""
        return self.loaded.get(name) or self.unloaded.get(name) or NameOrder(name, 0)

    @property
    def ids(self) -> set[str]:
        """Ids of the adapters that have a name."""
        return {order.adapter_id for order in self.loaded.values()}

    def number(self, name: str, generation: int | None, now_ns: int) -> int:
        """Return the generation of an order; without one, it is the last of the name.

        Raises InvalidRequest for one that would outrank all orders of the next days.
        """
        if generation is None:
            return max(now_ns, self.last(name).generation + 1)
        if not 0 <= generation <= now_ns + MAX_AHEAD_NS:
            raise InvalidRequest(
                "generation must be a time in nanoseconds since 1970, not later than tomorrow: "
                "compare the clocks of router and node",
                "generation",
            )
        return generation

    def check(self, order: NameOrder) -> None:
        """Raise OutdatedOrder for what comes too late."""
        if order.rank < self.last(order.name).rank:
            raise OutdatedOrder(
                f"a later order has loaded or unloaded {order.name!r}; send this again if it is "
                "still needed"
            )

    def note(self, order: NameOrder) -> None:
        """Give the name to an adapter, or take it away."""
        self.loaded.pop(order.name, None)
        self.unloaded.pop(order.name, None)
        if order.adapter is not None:
            self.loaded[order.name] = order
            return
        self.unloaded[order.name] = order
        if len(self.unloaded) > self._max_unloaded:
            self.unloaded.popitem(last=False)
