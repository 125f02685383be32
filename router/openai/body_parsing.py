"""Reading and parsing of request bodies, large ones on a thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from baton.router.input_processing.large_texts import LargeTextConfig, LargeTexts
from baton.router.openai.body_receiving import (
    SMALL_BODY_BYTES,
    BodyBudget,
    JsonGauge,
    Lease,
    max_values,
    read_body,
)
from baton.router.openai.request.bodies import json_object
from baton.router.routing.node_table import NodeTable

Result = TypeVar("Result")
# A single thread: each additional one would delay the event loop further, because of the GIL.
ONE_AT_A_TIME = LargeTextConfig(small_size=SMALL_BODY_BYTES, num_threads=1)


class Bodies:
    def __init__(self, table: NodeTable, budget: BodyBudget | None = None) -> None:
        self._table = table
        self._budget = budget or BodyBudget()
        self._thread = LargeTexts(ONE_AT_A_TIME)

    def lease(self) -> AbstractContextManager[Lease]:
        """Return a memory lease. Hold it as long as any part of the body is in memory."""
        return self._budget.lease()

    async def read(self, request: Request, lease: Lease) -> bytes:
        """Raises MessageTooLarge, QueueFull, BodyTimeout and ClientGone."""
        max_model_len = self._table.served_model("").max_model_len
        return await read_body(request, lease, JsonGauge(max_values(max_model_len)))

    async def fields(self, body: bytes) -> dict[str, Any]:
        """Parse the body. Raises Unreadable, and QueueFull if too many bodies wait to be parsed."""
        return await self.run_for_body(body, partial(json_object, body))

    async def run_for_body(self, body: bytes, work: Callable[[], Result]) -> Result:
        """Run `work`, whose time grows with the body. Raises what `work` raises, and QueueFull."""
        return await self._thread.read(len(body), work)
