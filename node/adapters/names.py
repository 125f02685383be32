"""Names of a node's adapters: the last order about each. Pure."""

from __future__ import annotations

from collections import OrderedDict

from baton.core.errors import InvalidRequest
from baton.core.ids import AdapterRef
from baton.rpc.errors import OutdatedOrder
from baton.rpc.node_info import NameOrder

MAX_UNLOADED = 1_024  # names remembered
MAX_GENERATION = 2**62  # in the year 2116, and far from the end of an int64


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

        One from a clock that is days ahead is taken, like all that follow it: refusing the latter
        would keep the name as it is for days. Raises InvalidRequest for what no clock can show.
        """
        if generation is None:
            return max(now_ns, self.last(name).generation + 1)
        if not 0 <= generation <= MAX_GENERATION:
            raise InvalidRequest(
                "generation must be a time in nanoseconds since 1970, at most 2**62: correct the "
                "clock of the router",
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
