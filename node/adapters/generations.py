"""Order of loads and unloads of the names of a node's adapters. Pure."""

from __future__ import annotations

from collections import OrderedDict

from baton.core.errors import InvalidRequest
from baton.rpc.errors import OutdatedOrder
from baton.rpc.node_info import UnloadedAdapter

MAX_UNLOADED = 1_024  # names remembered
MAX_AHEAD_NS = 24 * 3600 * 10**9  # of the node's clock


class NameGenerations:
    """Last order of each name: its generation, and the id that it gave to the name.

    Routers number their orders, each higher than all that they know of. An order that is lower than
    the last one of its name comes too late: it was delayed, or is from a router that did not know
    of the later one. Unloads are remembered as well, so that no late load revives a name. The last
    order wins everywhere; of two routers' orders with one number, the one with the higher id.
    """

    def __init__(self, max_unloaded: int = MAX_UNLOADED) -> None:
        self._max_unloaded = max_unloaded
        self._loaded: dict[str, tuple[int, str]] = {}  # generation and id
        self._unloaded: OrderedDict[str, int] = OrderedDict()  # the oldest order first

    @property
    def unloaded(self) -> tuple[UnloadedAdapter, ...]:
        return tuple(UnloadedAdapter(*item) for item in self._unloaded.items())

    def of(self, name: str) -> int:
        """Return the generation of a name; 0 if it was given at the start, or is not known."""
        return self._last(name)[0]

    def number(self, name: str, generation: int | None, now_ns: int) -> int:
        """Return the generation of an order; without one, it is the last of the name.

        Raises InvalidRequest for one that would outrank all orders of the next days.
        """
        if generation is None:
            return max(now_ns, self.of(name) + 1)
        if not 0 <= generation <= now_ns + MAX_AHEAD_NS:
            raise InvalidRequest(
                "generation must be a time in nanoseconds since 1970, not later than tomorrow: "
                "compare the clocks of router and node",
                "generation",
            )
        return generation

    def check(self, name: str, generation: int, adapter_id: str = "") -> None:
        """Raise OutdatedOrder for what comes too late. Without an id, it is an unload."""
        if (generation, adapter_id) < self._last(name):
            raise OutdatedOrder(
                f"a later order has loaded or unloaded {name!r}; send this again if it is still "
                "needed"
            )

    def note_load(self, name: str, generation: int, adapter_id: str) -> None:
        self._unloaded.pop(name, None)
        self._loaded[name] = generation, adapter_id

    def note_unload(self, name: str, generation: int) -> None:
        self._loaded.pop(name, None)
        self._unloaded[name] = generation
        self._unloaded.move_to_end(name)
        if len(self._unloaded) > self._max_unloaded:
            self._unloaded.popitem(last=False)

    def _last(self, name: str) -> tuple[int, str]:
        return self._loaded.get(name) or (self._unloaded.get(name, 0), "")
