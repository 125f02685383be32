"""Node without an engine: real servers and messages with a constant answer.

It measures the cost of its client. Like an engine, it sends each stream one token per step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

from grpc import aio

from baton.core.ids import Incarnation, NodeId
from baton.core.legs import LegKind
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.kv_transfer.layout import KvLayout
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.node.call_streams import CallContext, serve_calls
from baton.rpc.cached_prefixes import PrefixChanges
from baton.rpc.node_info import NodeCard, NodeLoad, card_to, update_to
from baton.rpc.process_end import end_with_parent
from baton.rpc.server import Service, announce, serving, stop_signal
from baton.v1 import node_pb2, node_pb2_grpc, sampling_pb2

Context = aio.ServicerContext[Any, Any]

# With the demo model these ids are words of Python, spaces and punctuation.
ANSWER = tuple(range(300, 700))
UNFINISHED = sampling_pb2.FINISH_REASON_UNSPECIFIED


class Steps:
    """Clock of the steps at which every stream gets its next token."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._step = asyncio.Event()

    async def next(self) -> None:
        if self._interval_s:
            await self._step.wait()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for number in itertools.count(1):
            await asyncio.sleep(began_s + number * self._interval_s - loop.time())
            self._step.set()
            self._step = asyncio.Event()


class CannedLegs(node_pb2_grpc.LegServiceServicer):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    async def Serve(  # noqa: N802
        self, request_iterator: AsyncIterator[node_pb2.ServeRequest], context: Context
    ) -> AsyncGenerator[node_pb2.ServeResponse, None]:
        async with aclosing(
            serve_calls(request_iterator, self._serve, _uncounted, asyncio.Event().wait)
        ) as calls:
            async for events in calls:
                yield node_pb2.ServeResponse(events=events)

    async def _serve(
        self, kind: LegKind, order: node_pb2.LegOrder, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        sequence = order.sequence
        first = len(sequence.prior_output_token_ids)
        if kind is LegKind.PREFILL:
            yield _token(first, sampling_pb2.FINISH_REASON_HANDED_OFF)
            return
        first += order.HasField("receives_from")
        last = sequence.sampling.max_tokens - 1
        for index in range(first, last + 1):
            await self._steps.next()
            is_last = index == last
            event = _token(index, sampling_pb2.FINISH_REASON_LENGTH if is_last else UNFINISHED)
            if index in (first, last):
                event.summary.SetInParent()
            yield event

    async def Connect(  # noqa: N802
        self, request: node_pb2.ConnectRequest, context: Context
    ) -> node_pb2.ConnectResponse:
        return node_pb2.ConnectResponse()


class CannedState(node_pb2_grpc.NodeServiceServicer):
    def __init__(self, card: NodeCard) -> None:
        self._card = card

    async def GetNode(  # noqa: N802
        self, request: node_pb2.GetNodeRequest, context: Context
    ) -> node_pb2.GetNodeResponse:
        return card_to(self._card)

    async def Watch(  # noqa: N802
        self, request: node_pb2.WatchRequest, context: Context
    ) -> AsyncGenerator[node_pb2.WatchResponse, None]:
        yield update_to(NodeLoad(), PrefixChanges(1, True, b""))
        await asyncio.Event().wait()

    async def Drain(  # noqa: N802
        self, request: node_pb2.DrainRequest, context: Context
    ) -> node_pb2.DrainResponse:
        return node_pb2.DrainResponse()

    async def SetLegs(  # noqa: N802
        self, request: node_pb2.SetLegsRequest, context: Context
    ) -> node_pb2.SetLegsResponse:
        return node_pb2.SetLegsResponse()

    async def SetPause(  # noqa: N802
        self, request: node_pb2.SetPauseRequest, context: Context
    ) -> node_pb2.SetPauseResponse:
        return node_pb2.SetPauseResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: node_pb2.ResetPrefixCacheRequest, context: Context
    ) -> node_pb2.ResetPrefixCacheResponse:
        return node_pb2.ResetPrefixCacheResponse()

    async def ReadAdapter(  # noqa: N802
        self, request: node_pb2.ReadAdapterRequest, context: Context
    ) -> node_pb2.ReadAdapterResponse:
        return node_pb2.ReadAdapterResponse()

    async def SetAdapterNames(  # noqa: N802
        self, request: node_pb2.SetAdapterNamesRequest, context: Context
    ) -> node_pb2.SetAdapterNamesResponse:
        return node_pb2.SetAdapterNamesResponse()


def _uncounted(_: LegKind) -> AbstractContextManager[None]:
    return nullcontext()


def _token(index: int, reason: sampling_pb2.FinishReason.ValueType) -> node_pb2.CallEvent:
    output = node_pb2.TokenOutput(
        first_index=index, token_ids=[ANSWER[index % len(ANSWER)]], finish_reason=reason
    )
    return node_pb2.CallEvent(output=output)


def canned_card(role: LegKind) -> NodeCard:
    return NodeCard(
        node_id=NodeId(f"canned-{role.value}"),
        incarnation=Incarnation("1"),
        legs=(role,),
        fingerprint=Fingerprint("canned", KvLayout("", 16, 1, 1, 1)),
        model="canned",
        max_model_len=2**20,
        vocab_size=2**15,
        num_blocks=2**16,
        block_bytes=1,
        kv_transport="none",
        prefix_naming=PrefixNaming(16, "canned"),
    )


async def serve(role: LegKind, interval_s: float) -> None:
    steps, state = Steps(interval_s), CannedState(canned_card(role))
    legs = CannedLegs(steps)
    services = (
        Service(
            "baton.v1.LegService",
            lambda server: node_pb2_grpc.add_LegServiceServicer_to_server(legs, server),
        ),
        Service(
            "baton.v1.NodeService",
            lambda server: node_pb2_grpc.add_NodeServiceServicer_to_server(state, server),
        ),
    )
    async with serving("127.0.0.1", 0, services) as server, stop_signal() as stop:
        stepping = asyncio.ensure_future(steps.run()) if interval_s else None
        await server.health.set_ready(True)
        announce(role.value, server.address)
        await stop.wait()
        if stepping is not None:
            stepping.cancel()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", type=LegKind, required=True)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent_pid)
    asyncio.run(serve(options.role, options.interval_ms / 1e3))


if __name__ == "__main__":
    main()
