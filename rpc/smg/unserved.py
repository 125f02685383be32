"""Methods of SMG's services that Baton does not serve: each says what to use instead."""

from __future__ import annotations

from typing import Any

from grpc import StatusCode, aio

Context = aio.ServicerContext[Any, Any]


class UnservedMethods:
    """Base class of the servicers. Their generated base would log each call as a failure."""

    async def Embed(self, request: object, context: Context) -> Any:  # noqa: N802
        await _refuse(context, "Embed", "use /v1/embeddings or Embed of Baton's router")

    async def StartProfile(self, request: object, context: Context) -> Any:  # noqa: N802
        await _refuse(context, "StartProfile", "use Baton's traces (docs/observability.md)")

    async def StopProfile(self, request: object, context: Context) -> Any:  # noqa: N802
        await _refuse(context, "StopProfile", "use Baton's traces (docs/observability.md)")

    async def SubscribeKvEvents(self, request: object, context: Context) -> Any:  # noqa: N802
        await _refuse(context, "SubscribeKvEvents", "nodes publish events by --kv-events-endpoint")

    async def LoadLoRAAdapter(self, request: object, context: Context) -> Any:  # noqa: N802
        await _refuse(context, "LoadLoRAAdapter", "use `baton adapters` with Baton's router")

    async def UnloadLoRAAdapter(self, request: object, context: Context) -> Any:  # noqa: N802
        await _refuse(context, "UnloadLoRAAdapter", "use `baton adapters` with Baton's router")

    async def ListLoadedLoRAAdapters(self, request: object, context: Context) -> Any:  # noqa: N802
        await _refuse(context, "ListLoadedLoRAAdapters", "use `baton nodes` with Baton's router")


async def _refuse(context: Context, method: str, advice: str) -> None:
    await context.abort(StatusCode.UNIMPLEMENTED, f"Baton does not serve {method}: {advice}")
