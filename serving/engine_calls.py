"""The engine's outputs as one stream per request, on the asyncio side of the wall."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol

from engine.errors import EngineStopped, InvalidRequest, PassFailed
from engine.loop import Deliver
from engine.request import ClientId, FinishReason, Output, RequestId, RequestSpec
from serving.errors import KvLoadFailed, RequestIdInUse

CLIENT_ID = ClientId("grpc")


class Engine(Protocol):
    """What a servicer may ask of the engine's loop."""

    @property
    def failure(self) -> BaseException | None: ...

    def attach(self, client_id: ClientId, deliver: Deliver) -> None: ...

    def detach(self, client_id: ClientId) -> None: ...

    def submit(self, spec: RequestSpec) -> None: ...

    def abort(self, request_id: RequestId) -> None: ...


class EngineCalls:
    """Sends requests to the engine and hands each one's outputs to whoever waits for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._inbox_by_request: dict[RequestId, asyncio.Queue[Output]] = {}
        self._changed = asyncio.Event()

    def __enter__(self) -> EngineCalls:
        self._engine.attach(CLIENT_ID, self._deliver)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.detach(CLIENT_ID)

    @property
    def num_unfinished(self) -> int:
        return len(self._inbox_by_request)

    def next_change(self) -> asyncio.Event:
        """Set when a request comes or goes after this call."""
        return self._changed

    def touch(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def touch_from_engine(self) -> None:
        """The same, from the engine's thread."""
        self._loop.call_soon_threadsafe(self.touch)

    async def outputs(self, spec: RequestSpec) -> AsyncGenerator[Output, None]:
        """Whatever the request gets, to its end. Left early, the request is aborted.

        Raises EngineStopped if the engine dies of something: that is no fault of the request,
        and another node can go on with it; KvLoadFailed likewise; PassFailed if passes fail with
        this request alone, which another node may be tried for; and InvalidRequest if it is found
        out, only now, to be one that cannot be served.
        """
        inbox = self._open(spec.request_id)
        is_finished = False
        try:
            self._engine.submit(spec)
            while not is_finished:
                output = await inbox.get()
                is_finished = output.finish_reason is not None
                if output.finish_reason is FinishReason.ERROR and self._engine.failure is not None:
                    raise EngineStopped(output.error or "the engine of this node has stopped")
                if output.has_crashed:
                    raise PassFailed(output.error or "the engine gave no reason")
                if output.is_kv_lost:
                    raise KvLoadFailed(output.error or "the engine gave no reason")
                if output.is_refused:
                    raise InvalidRequest(output.error or "the engine gave no reason")
                yield output
        finally:
            if not is_finished:
                self._engine.abort(spec.request_id)
            self._shut(spec.request_id)

    def _open(self, request_id: RequestId) -> asyncio.Queue[Output]:
        if request_id in self._inbox_by_request:
            raise RequestIdInUse(f"request {request_id} is under way; choose another id")
        inbox: asyncio.Queue[Output] = asyncio.Queue()
        self._inbox_by_request[request_id] = inbox
        self.touch()
        return inbox

    def _shut(self, request_id: RequestId) -> None:
        del self._inbox_by_request[request_id]
        self.touch()

    def _deliver(self, outputs: list[Output]) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._sort, outputs)

    def _sort(self, outputs: list[Output]) -> None:
        for output in outputs:
            inbox = self._inbox_by_request.get(output.request_id)
            if inbox is not None:
                inbox.put_nowait(output)
