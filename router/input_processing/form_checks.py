"""Checks structured-output forms on a separate thread before a request is sent to nodes.

Nodes check them again with their own model's tokenizer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.engine.structured_output.llguidance_backend import Checked
from baton.rpc.errors import QueueFull

MAX_WAITING = 1024
MAX_WAITING_CHARACTERS = 1 << 26
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

    async def check(self, form: StructuredOutputs) -> None:
        """Raises InvalidRequest for a form that cannot be used, and QueueFull if too many wait."""
        size = len(form.text)
        num_characters = self._num_waiting_characters + size
        if self._num_waiting >= self._max_waiting or num_characters > self._max_waiting_characters:
            raise QueueFull(
                f"the forms of {self._num_waiting} requests already wait to be checked; send "
                "this one later",
                RETRY_AFTER_S,
            )
        self._num_waiting += 1
        self._num_waiting_characters += size
        try:
            outcome = await self._outcome(form)
        finally:
            self._num_waiting -= 1
            self._num_waiting_characters -= size
        if isinstance(outcome, InvalidRequest):
            raise InvalidRequest(str(outcome), outcome.field)

    async def _outcome(self, form: StructuredOutputs) -> Checked | InvalidRequest:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Checked | InvalidRequest] = loop.create_future()

        def set_result(outcome: Checked | InvalidRequest) -> None:
            if not result.done():
                result.set_result(outcome)

        def deliver(outcome: Checked | InvalidRequest) -> None:
            with suppress(RuntimeError):  # the loop is closed: no task waits any more
                loop.call_soon_threadsafe(set_result, outcome)

        self._compiler.start(form, deliver)
        try:
            return await result
        except asyncio.CancelledError:
            self._compiler.cancel(form, deliver)
            raise
