"""Calls of the engine from the asyncio thread: output streams, and functions run between steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import TypeVar

from baton.core.errors import InvalidRequest, NamedError
from baton.core.ids import RequestId
from baton.core.output import FailureCause, Output
from baton.core.request import EngineRequest
from baton.engine.engine_thread import EngineThread
from baton.engine.errors import EngineKilled, EngineStopped, PassFailed
from baton.rpc.errors import KvLoadFailed, RequestIdInUse

# Errors of failed requests. A failure of the model is an output instead.
ERRORS: dict[FailureCause, type[NamedError]] = {
    FailureCause.REQUEST: InvalidRequest,
    FailureCause.PASS: PassFailed,
    FailureCause.KV_LOST: KvLoadFailed,
    FailureCause.ENGINE_STOPPED: EngineStopped,
    FailureCause.ENGINE_KILLED: EngineKilled,
}

Result = TypeVar("Result")


async def run_on_engine(engine: EngineThread, function: Callable[[], Result]) -> Result:
    """Run `function` on the engine's thread, between two steps. Raises EngineStopped."""
    return await asyncio.wrap_future(engine.call(function))


class NodeChanges:
    """Signal that the load or the cached blocks of a node have changed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Return an event that is set at the first change after this call."""
        return self._changed

    def notify(self) -> None:
        """Set the event of `next` and replace it."""
        self._changed.set()
        self._changed = asyncio.Event()

    def notify_threadsafe(self) -> None:
        """Like `notify`, from any other thread."""
        self._loop.call_soon_threadsafe(self.notify)


class EngineCalls:
    """Submits requests to the engine and routes outputs to the stream of their request."""

    def __init__(self, engine: EngineThread, changes: NodeChanges) -> None:
        """`changes` are notified of each request that is added or removed."""
        self.changes = changes
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._registrations = itertools.count(1)
        self._registration_by_request: dict[RequestId, int] = {}
        # An id that is used again while outputs of its closed stream are on the way gets none.
        self._inbox_by_registration: dict[int, asyncio.Queue[Output]] = {}

    def __enter__(self) -> EngineCalls:
        self._engine.attach(self._deliver)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.detach()

    @property
    def num_unfinished(self) -> int:
        return len(self._registration_by_request)

    async def stream_outputs(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """Yield the request's outputs until it finishes. Closing the generator early aborts it.

        Raises:
            EngineStopped: the engine failed for a reason unrelated to the request, which can
                continue on another node.
            KvLoadFailed: the KV did not arrive; the request can continue on another node.
            PassFailed: forward passes fail with this request alone; another node can be tried.
            InvalidRequest: the engine found that it can never serve the request.
        """
        registration = self._register(request.request_id)
        inbox = self._inbox_by_registration[registration]
        is_finished = False
        try:
            self._engine.submit(replace(request, registration=registration))
            while not is_finished:
                output = await inbox.get()
                is_finished = output.finish_reason is not None
                if output.failure is not None and output.failure.cause in ERRORS:
                    raise ERRORS[output.failure.cause](output.failure.reason)
                yield output
        finally:
            if not is_finished:
                self._engine.abort(request.request_id)
            self._unregister(request.request_id)

    def _register(self, request_id: RequestId) -> int:
        if request_id in self._registration_by_request:
            raise RequestIdInUse(f"request {request_id} is under way; choose another id")
        registration = self._registration_by_request[request_id] = next(self._registrations)
        self._inbox_by_registration[registration] = asyncio.Queue()
        self.changes.notify()
        return registration

    def _unregister(self, request_id: RequestId) -> None:
        del self._inbox_by_registration[self._registration_by_request.pop(request_id)]
        self.changes.notify()

    def _deliver(self, outputs: list[Output]) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            inbox = self._inbox_by_registration.get(output.registration)
            if inbox is not None:
                inbox.put_nowait(output)
