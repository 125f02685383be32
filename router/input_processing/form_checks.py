"""Checks structured-output forms on a separate thread before a request is sent to nodes.

Nodes check them again with their own model's tokenizer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.engine.structured_output.llguidance_backend import Checked
from baton.router.fair_slots import has_token
from baton.rpc.errors import QueueFull

MAX_WAITING = 1024
MAX_WAITING_CHARACTERS = 1 << 26
CLIENT_SHARE = 4  # a client with a token uses at most this part of both limits
RETRY_AFTER_S = 1.0


class FormChecks:
    """Checks forms with a grammar compiler, which caches its results."""

    def __init__(
        self,
        compiler: GrammarCompiler[Checked],
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_characters: int = MAX_WAITING_CHARACTERS,
    ) -> None:
        self._compiler = compiler
        self._max_waiting = max_waiting
        self._max_waiting_characters = max_waiting_characters
        self._num_waiting = 0
        self._num_waiting_characters = 0
        self._waiting_by_client: Counter[str] = Counter()
        self._characters_by_client: Counter[str] = Counter()

    async def check(self, form: StructuredOutputs, client: str = "") -> None:
        """Raises InvalidRequest for a form that cannot be used, and QueueFull if too many wait.

        Clients take turns, by names of `turn_name`.
        """
        size = len(form.text)
        self._check_limits(size, client)
        self._count(1, size, client)
        try:
            outcome = await self._outcome(form, client)
        finally:
            self._count(-1, -size, client)
        if isinstance(outcome, InvalidRequest):
            raise InvalidRequest(str(outcome), outcome.field)

    def _check_limits(self, size: int, client: str) -> None:
        num_characters = self._num_waiting_characters + size
        if self._num_waiting >= self._max_waiting or num_characters > self._max_waiting_characters:
            raise QueueFull(
                f"the forms of {self._num_waiting} requests already wait to be checked; send "
                "this one later",
                RETRY_AFTER_S,
            )
        number, num_characters = (
            self._waiting_by_client[client],
            self._characters_by_client[client] + size,
        )
        is_over = (
            number >= self._max_waiting // CLIENT_SHARE
            or num_characters > self._max_waiting_characters // CLIENT_SHARE
        )
        if has_token(client) and number and is_over:
            raise QueueFull(
                f"the forms of {number} requests of this token already wait to be checked; send "
                "this one later",
                RETRY_AFTER_S,
            )

    def _count(self, number: int, size: int, client: str) -> None:
        self._num_waiting += number
        self._num_waiting_characters += size
        self._waiting_by_client[client] += number
        self._characters_by_client[client] += size
        if not self._waiting_by_client[client]:
            del self._waiting_by_client[client], self._characters_by_client[client]

    async def _outcome(self, form: StructuredOutputs, client: str) -> Checked | InvalidRequest:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Checked | InvalidRequest] = loop.create_future()

        def set_result(outcome: Checked | InvalidRequest) -> None:
            if not result.done():
                result.set_result(outcome)

        def deliver(outcome: Checked | InvalidRequest) -> None:
            with suppress(RuntimeError):  # the loop is closed: no task waits any more
                loop.call_soon_threadsafe(set_result, outcome)

        self._compiler.start(form, deliver, client)
        try:
            return await result
        except asyncio.CancelledError:
            self._compiler.cancel(form, deliver)
            raise
