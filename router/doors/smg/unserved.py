"""Methods of SMG's VllmEngine that Baton does not serve: each says what to use instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from grpc import StatusCode, aio

Context = aio.ServicerContext[Any, Any]
Method = Callable[[Any, object, Context], Awaitable[None]]


def _unserved(name: str, advice: str) -> Method:
    async def refuse(_self: Any, _request: object, context: Context) -> None:
        await context.abort(StatusCode.UNIMPLEMENTED, f"Baton does not serve {name}: {advice}")

    return refuse


class UnservedMethods:
    """Base class of the servicer. Its generated base would log each call as a failure."""

    Embed = _unserved("Embed", "use /v1/embeddings or Embed of Baton's router")
    StartProfile = _unserved("StartProfile", "use Baton's traces (docs/observability.md)")
    StopProfile = _unserved("StopProfile", "use Baton's traces (docs/observability.md)")
    SubscribeKvEvents = _unserved(
        "SubscribeKvEvents", "nodes publish events by --kv-events-endpoint"
    )
