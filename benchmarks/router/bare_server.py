"""Lower bound of the cost of a streamed token in Python: `grpc.aio` writes constant bytes.

The server takes the place of the router, without nodes and without building messages.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc import aio

from baton.rpc.process_end import end_with_parent
from baton.rpc.server import announce, stop_signal
from baton.v1 import inference_pb2
from benchmarks.router.canned_node import Steps

SERVICE, METHOD = "baton.v1.InferenceService", "Generate"


class BareGenerate:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._token = inference_pb2.GenerateResponse(
            request_id="0123456789abcdef01234567", first_index=5, token_ids=[500], text=" self"
        ).SerializeToString()

    async def stream(
        self, request: inference_pb2.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        for _ in range(request.sampling.max_tokens):
            await self._steps.next()
            await context.write(self._token)


async def serve(interval_s: float) -> None:
    steps = Steps(interval_s)
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        BareGenerate(steps).stream, inference_pb2.GenerateRequest.FromString
    )
    server = aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with stop_signal() as stop:
        stepping = asyncio.ensure_future(steps.run()) if interval_s else None
        announce("bare", f"127.0.0.1:{port}")
        await stop.wait()
        if stepping is not None:
            stepping.cancel()
    await server.stop(None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent_pid)
    asyncio.run(serve(options.interval_ms / 1e3))


if __name__ == "__main__":
    main()
