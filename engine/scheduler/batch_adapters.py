"""Places for the adapters of a batch. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from baton.core.ids import RequestId
from baton.core.request import EngineRequest


class BatchAdapters:
    """Adapters of the requests that run, or hold blocks until they run: only so many at a time.

    Requests without an adapter need no place, and are not noted here.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        # By adapter, the one that has had its place for the longest time first.
        self._ids_by_adapter: dict[str, set[RequestId]] = {}

    def __len__(self) -> int:
        """Return the number of places that are taken."""
        return len(self._ids_by_adapter)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._ids_by_adapter

    @property
    def num_free(self) -> int:
        return self._num_places - len(self._ids_by_adapter)

    @property
    def oldest(self) -> str | None:
        """The adapter that has had its place for the longest time."""
        return next(iter(self._ids_by_adapter), None)

    def has_place(self, adapter: str) -> bool:
        return adapter in self or self.num_free > 0

    def holders(self) -> Iterable[Collection[RequestId]]:
        """Return the requests that hold each place."""
        return self._ids_by_adapter.values()

    def take(self, request: EngineRequest) -> None:
        self._ids_by_adapter.setdefault(request.adapter.id, set()).add(request.request_id)

    def release(self, request: EngineRequest) -> None:
        """Free the place with the last of its requests. Requests that took none are ignored."""
        holders = self._ids_by_adapter.get(request.adapter.id)
        if holders is not None:
            holders.discard(request.request_id)
            if not holders:
                del self._ids_by_adapter[request.adapter.id]
