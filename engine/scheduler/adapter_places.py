"""Places for the adapters of a batch. Pure."""

from __future__ import annotations

from collections import Counter

from baton.core.ids import RequestId
from baton.core.request import EngineRequest


class AdapterPlaces:
    """Adapters of the requests that run, or hold blocks until they run: only so many at a time."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_requests: Counter[str] = Counter()  # by adapter
        self._adapter_by_id: dict[RequestId, str] = {}

    def __len__(self) -> int:
        """Return the number of places that are taken."""
        return len(self._num_requests)

    def has_place(self, adapter: str) -> bool:
        is_there = not adapter or adapter in self._num_requests
        return is_there or len(self._num_requests) < self._num_places

    def take(self, request: EngineRequest) -> None:
        adapter = request.adapter.id
        if adapter and request.request_id not in self._adapter_by_id:
            self._adapter_by_id[request.request_id] = adapter
            self._num_requests[adapter] += 1

    def release(self, request: EngineRequest) -> bool:
        """Return whether this frees a place. Requests that took none are ignored."""
        adapter = self._adapter_by_id.pop(request.request_id, "")
        if not adapter:
            return False
        self._num_requests[adapter] -= 1
        if self._num_requests[adapter]:
            return False
        del self._num_requests[adapter]
        return True
