"""Router benchmark: CPU time of the router per token and per request, and the latency it adds.

The nodes answer over real gRPC but compute nothing. CPU time is that of the router process, as
counted by the kernel. A bare gRPC server with the same streams is measured in alternation: its
cost per token is the lower bound for a router in Python.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TypeAlias

from grpc import aio

from baton.cluster import await_serving
from baton.core.ids import HandoffId, Peer
from baton.core.legs import LegKind
from baton.core.request import EngineRequest, ReceiveKv
from baton.core.sampling import SamplingParams
from baton.router.dispatch.node_calls import NodeStream
from baton.rpc.channel import open_channel
from baton.rpc.messages.calls import leg_order, node_request_id
from baton.v1 import inference_pb2, inference_pb2_grpc, node_pb2_grpc, sampling_pb2
from benchmarks.processes import ServerProcess, server
from benchmarks.router.canned_node import canned_card

# The difference to a full answer separates the cost per token from that per request.
SHORT_ANSWER = 2
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RouterBench:
    """Settings of the benchmark."""

    model: str = "models/demo"  # the router uses its tokenizer
    num_streams: int = 64
    answer_tokens: int = 128
    prompt_tokens: int = 512
    interval_ms: float = 20.0  # between tokens of a stream; 0: no delay
    num_first_tokens: int = 30  # sequential requests per round that measure the added latency
    num_rounds: int = 5


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of one round."""

    cpu_us_per_token: float
    bare_us_per_token: float
    cpu_us_per_request: float
    tokens_per_s: float
    direct_ttft_ms: float
    router_ttft_ms: float

    @property
    def added_ttft_ms(self) -> float:
        return self.router_ttft_ms - self.direct_ttft_ms


@dataclass(frozen=True, slots=True)
class RouterFigure:
    """Median and range over the rounds."""

    name: str
    median: float
    least: float
    most: float


# In quotes, since the class exists only in the type stubs.
Stub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"
FIGURES = (
    "cpu_us_per_token",
    "bare_us_per_token",
    "cpu_us_per_request",
    "tokens_per_s",
    "direct_ttft_ms",
    "router_ttft_ms",
    "added_ttft_ms",
)


def run(bench: RouterBench, on_round: Callable[[Round], None]) -> list[RouterFigure]:
    """Run the benchmark; `on_round` is called with each round."""
    canned = "benchmarks.router.canned_node", "--interval-ms", str(bench.interval_ms), "--role"
    with (
        server(*canned, "prefill") as prefill,
        server(*canned, "decode") as decode,
        server(*_router_command(bench, prefill, decode)) as router,
        server("benchmarks.router.bare_server", "--interval-ms", str(bench.interval_ms)) as bare,
    ):
        await_serving(router.address, START_TIMEOUT_S)
        rounds = asyncio.run(
            _rounds(bench, BenchProcesses(router, prefill, decode, bare), on_round)
        )
    return [_figure(name, [getattr(one, name) for one in rounds]) for name in FIGURES]


def _router_command(bench: RouterBench, prefill: ServerProcess, decode: ServerProcess) -> list[str]:
    text = ["--model", bench.model] if bench.model else []
    nodes = ["--prefill-nodes", prefill.address, "--decode-nodes", decode.address]
    return ["baton", "serve", "router", "--port", "0", *text, *nodes]


@dataclass(frozen=True, slots=True)
class BenchProcesses:
    router: ServerProcess
    prefill: ServerProcess
    decode: ServerProcess
    bare: ServerProcess


async def _rounds(
    bench: RouterBench, cluster: BenchProcesses, on_round: Callable[[Round], None]
) -> list[Round]:
    async with RouterMeter(bench, cluster) as meter:
        await meter.round()  # warm-up
        rounds = []
        for _ in range(bench.num_rounds):
            rounds.append(await meter.round())
            on_round(rounds[-1])
    return rounds


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """CPU time of one process."""

    token_s: float
    request_s: float
    tokens_per_s: float


class RouterMeter:
    """Measures router, nodes and bare server alternately, so that noise affects them alike."""

    def __init__(self, bench: RouterBench, cluster: BenchProcesses) -> None:
        self._bench = bench
        self._cluster = cluster
        self._numbers = itertools.count()
        self._lifetime = AsyncExitStack()

    async def __aenter__(self) -> RouterMeter:
        cluster, channel = self._cluster, self._channel
        self._router = inference_pb2_grpc.InferenceServiceStub(await channel(cluster.router))
        self._bare = inference_pb2_grpc.InferenceServiceStub(await channel(cluster.bare))
        prefill, decode = await channel(cluster.prefill), await channel(cluster.decode)
        self._prefill = NodeStream(node_pb2_grpc.LegServiceStub(prefill).Serve)
        self._decode = NodeStream(node_pb2_grpc.LegServiceStub(decode).Serve)
        return self

    async def _channel(self, to: ServerProcess) -> aio.Channel:
        return await self._lifetime.enter_async_context(open_channel(to.address))

    async def __aexit__(self, *_: object) -> None:
        await self._lifetime.aclose()

    async def round(self) -> Round:
        bench = self._bench
        direct, routed = [], []
        for _ in range(bench.num_first_tokens):
            direct.append(await self._direct_ttft_s())
            routed.append(await self._ttft_s())
        bare = await self._cost(self._bare, self._cluster.bare)
        routed_cost = await self._cost(self._router, self._cluster.router)
        return Round(
            cpu_us_per_token=routed_cost.token_s * 1e6,
            bare_us_per_token=bare.token_s * 1e6,
            cpu_us_per_request=routed_cost.request_s * 1e6,
            tokens_per_s=routed_cost.tokens_per_s,
            direct_ttft_ms=statistics.median(direct) * 1e3,
            router_ttft_ms=statistics.median(routed) * 1e3,
        )

    async def _cost(self, stub: Stub, process: ServerProcess) -> ProcessCost:
        num_streams, answer_tokens = self._bench.num_streams, self._bench.answer_tokens
        short_s, _ = await self._cpu_s(stub, process, SHORT_ANSWER)
        whole_s, elapsed_s = await self._cpu_s(stub, process, answer_tokens)
        token_s = (whole_s - short_s) / (num_streams * (answer_tokens - SHORT_ANSWER))
        return ProcessCost(
            token_s=token_s,
            request_s=short_s / num_streams - SHORT_ANSWER * token_s,
            tokens_per_s=num_streams * answer_tokens / elapsed_s,
        )

    async def _cpu_s(
        self, stub: Stub, process: ServerProcess, answer_tokens: int
    ) -> tuple[float, float]:
        """Return the CPU time of a process for all concurrent streams, and the elapsed time."""
        before_s, began_s = process.cpu_s(), perf_counter()
        streams = (self._stream(stub, answer_tokens) for _ in range(self._bench.num_streams))
        await asyncio.gather(*streams)
        return process.cpu_s() - before_s, perf_counter() - began_s

    async def _stream(self, stub: Stub, answer_tokens: int) -> None:
        num_tokens = 0
        async for response in stub.Generate(self._request(answer_tokens)):
            num_tokens += len(response.token_ids)
        if num_tokens != answer_tokens:
            raise RuntimeError(f"received {num_tokens} tokens instead of {answer_tokens}")

    async def _ttft_s(self) -> float:
        request, began_s = self._request(SHORT_ANSWER), perf_counter()
        call = self._router.Generate(request)
        await call.read()
        took_s = perf_counter() - began_s
        while await call.read() is not aio.EOF:
            pass
        return took_s

    async def _direct_ttft_s(self) -> float:
        """Time the first token with the two calls that the router makes, without the router."""
        handoff_id = HandoffId(f"direct-{next(self._numbers)}", 1)
        source = Peer(canned_card(LegKind.PREFILL).node_id, self._cluster.prefill.address)
        request_id, sampling = node_request_id(handoff_id), _sampling(SHORT_ANSWER)
        request = EngineRequest(request_id, self._prompt(), sampling, seed=0)
        began_s = perf_counter()
        first_event = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as both:
            receiver = replace(request, receive_from=ReceiveKv(handoff_id, source))
            decode = leg_order(LegKind.DECODE, receiver)
            both.create_task(self._decode.call(decode, _ignore))
            prefill = leg_order(LegKind.PREFILL, replace(request, send_to=handoff_id))
            both.create_task(self._prefill.call(prefill, first_event.set_result))
            await first_event
            return perf_counter() - began_s

    def _request(self, answer_tokens: int) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            token_ids=sampling_pb2.TokenIds(ids=self._prompt()),
            sampling=sampling_pb2.SamplingParams(max_tokens=answer_tokens, ignore_eos=True),
        )

    def _prompt(self) -> tuple[int, ...]:
        """Return a new prompt each time, so that no cache hits."""
        number = next(self._numbers)
        return tuple((number + place * place) % 8192 for place in range(self._bench.prompt_tokens))


def _ignore(event: object) -> None:
    """Drop the event: only its time matters."""


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def _figure(name: str, values: Sequence[float]) -> RouterFigure:
    return RouterFigure(name, statistics.median(values), min(values), max(values))
