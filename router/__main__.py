"""Router process: accepts client requests, dispatches them to nodes, streams the answers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

from grpc import aio

from baton.core.legs import LegKind
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.engine.structured_output.llguidance_backend import validate_grammar
from baton.router.discovery.node_reports import PATIENCE_S, Readiness, report_nodes
from baton.router.discovery.watcher import NodeDiscovery, watching
from baton.router.dispatch.foreign_prefills import ForeignPrefills
from baton.router.dispatch.node_calls import GrpcNodeCalls
from baton.router.dispatch.vllm.prefills import VllmPrefills
from baton.router.dispatch.vllm.servers import PrefillServers
from baton.router.doors.grpc.cluster_servicer import ClusterServicer
from baton.router.doors.grpc.servicer import InferenceServicer
from baton.router.doors.smg.service import smg_services
from baton.router.input_processing.form_checks import FormChecks
from baton.router.input_processing.model_profiles import ModelProfile, ModelProfiles
from baton.router.loading import load_profiles
from baton.router.options import RouterOptions
from baton.router.orders.adapter_updates import AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.router.pictures.image_hosts import ImageHosts
from baton.router.pictures.plan import ImageSource
from baton.router.pipeline import Pipeline, PipelineConfig
from baton.router.request_scope import RequestScopes
from baton.router.routing.node_table import NodeTable
from baton.router.tracing import Tracing
from baton.rpc.health import Health
from baton.rpc.node_info import NodeStatus
from baton.rpc.process_end import ShutdownDeadline
from baton.rpc.security.token_gate import TokenInterceptor, ignore_refusal
from baton.rpc.server import Running, Service, announce, freeze_heap, serving, stop_signal
from baton.telemetry.metrics import names as metric_names
from baton.telemetry.metrics.instruments import Reading, RouterMetrics, exposition
from baton.telemetry.metrics.readers import OwnerThreadReader, export_metrics
from baton.telemetry.resource import Process
from baton.telemetry.tracing.tracer import NO_TRACER, Tracer, tracing
from baton.v1 import cluster_pb2_grpc, inference_pb2_grpc

ID_BYTES = 4

log = logging.getLogger(__name__)


def main(options: RouterOptions) -> None:
    """Serve until SIGTERM. Raises named errors for options that cannot work."""
    profiles = load_profiles(options.models)
    process = Process("router", f"router-{os.getpid()}", secrets.token_hex(ID_BYTES))
    with tracing(options.telemetry, process) as tracer:
        asyncio.run(serve(options, profiles, process, tracer))


async def serve(
    options: RouterOptions,
    profiles: Sequence[ModelProfile],
    process: Process,
    tracer: Tracer = NO_TRACER,
) -> None:
    router = RouterComponents(options, profiles, tracer)
    with ShutdownDeadline(options.drain_timeout_s) as deadline:
        await _serve(options, process, router, deadline)


async def _serve(
    options: RouterOptions, process: Process, router: RouterComponents, deadline: ShutdownDeadline
) -> None:
    async with (
        serving(
            options.host,
            options.port,
            _services(options, router),
            tls=options.tls,
            interceptors=_interceptors(options, router.metrics),
            for_clients=True,
        ) as server,
        router.node_calls,
    ):
        readiness = Readiness(
            wants_prefill=bool(options.baton_prefill_nodes),
            now=time.monotonic(),
            models=router.table.expected_models,
        )

        async def note_change() -> None:
            router.pipeline.handle_nodes_changed()
            router.adapters.handle_reports()
            is_ready = readiness.is_ready(router.table, time.monotonic())
            await server.health.set_ready(is_ready and not router.pipeline.is_draining)

        async with (
            watching(node_discovery(options), router.table, router.node_calls, note_change),
            _call_later(PATIENCE_S, note_change),
            AsyncExitStack() as watched,
        ):
            for foreign in router.foreign_prefills:
                await watched.enter_async_context(
                    foreign.watching(router.profiles, router.node_calls)
                )
            with router.compiler, _metrics(options, process, router):
                async with _http_server(options, router, server.health):
                    await _until_drained(server, router.pipeline, deadline)


class RouterComponents:
    """Parts of a router that its servers share."""

    def __init__(
        self, options: RouterOptions, profiles: Sequence[ModelProfile], tracer: Tracer
    ) -> None:
        # The name of a single model can be an assumption.
        expected = [profile.name for profile in profiles] if len(profiles) > 1 else ()
        self.table, self.node_calls = NodeTable(expected), GrpcNodeCalls(options.tls)
        self.compiler = GrammarCompiler(validate_grammar)
        servers: tuple[ForeignPrefills, ...] = (
            VllmPrefills(
                PrefillServers(options.vllm_servers, self.table, time.monotonic), time.monotonic
            ),
        )
        self.foreign_prefills = tuple(each for each in servers if each.has_servers)
        self.profiles = ModelProfiles(self.table, profiles, options.models.parsing_of())
        self.pipeline = Pipeline(
            table=self.table,
            node_calls=self.node_calls,
            profiles=self.profiles,
            clock=time.monotonic,
            config=PipelineConfig(options.dispatch, options.admission_queue),
            forms=FormChecks(self.compiler),
            foreign_prefills=self.foreign_prefills,
            image_source=_image_source(options.image_hosts),
            takes_prompt_embeds=options.enable_prompt_embeds,
        )
        # None: neither exported nor served over HTTP
        is_counted = options.telemetry.counts or options.http_port is not None
        self.metrics = RouterMetrics() if is_counted else None
        self.tracer = tracer
        self.scopes = RequestScopes(
            Tracing(tracer, self.metrics),
            by_token=options.tokens is not None,
            rate_limits=options.rate_limits,
        )
        self.orders = NodeOrders(self.table, self.node_calls.channel, options.operators)
        self.adapters = AdapterUpdates(self.table, self.node_calls.channel, options.operators)

    def report_nodes(self) -> tuple[NodeStatus, ...]:
        """Return the status of all nodes, servers that are not Baton's first."""
        foreign = (status for each in self.foreign_prefills for status in each.report())
        return (*foreign, *report_nodes(self.table))


def _image_source(hosts: ImageHosts) -> ImageSource | None:
    if not hosts.allows_any:
        return None
    # Imported late: routers that fetch nothing do not need a client of HTTP.
    from baton.router.pictures.fetching import ImageFetcher

    return ImageFetcher(hosts)


def _services(options: RouterOptions, router: RouterComponents) -> tuple[Service, ...]:
    inference = InferenceServicer(router.pipeline, router.scopes)
    cluster = ClusterServicer(router.report_nodes, router.orders, router.adapters)
    add_inference = partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, inference)
    add_cluster = partial(cluster_pb2_grpc.add_ClusterServiceServicer_to_server, cluster)
    return (
        Service("baton.v1.InferenceService", add_inference),
        Service("baton.v1.ClusterService", add_cluster),
        *smg_services(
            router.pipeline,
            router.scopes,
            router.orders,
            next((each.value for each in options.models.folders), ""),
            is_on=options.smg,
        ),
    )


def node_discovery(options: RouterOptions) -> NodeDiscovery:
    prefills = dict.fromkeys(options.baton_prefill_nodes, LegKind.PREFILL)
    decodes = dict.fromkeys(options.decode_nodes, LegKind.DECODE)
    encoders = dict.fromkeys(options.encode_nodes, LegKind.ENCODE)
    return NodeDiscovery(prefills | decodes | encoders, options.find_every_s)


@asynccontextmanager
async def _call_later(wait_s: float, do: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call `do` once after `wait_s`, unless the block ends before."""

    async def wait_and_do() -> None:
        await asyncio.sleep(wait_s)
        await do()

    waiting = asyncio.ensure_future(wait_and_do())
    try:
        yield
    finally:
        waiting.cancel()


@contextmanager
def _metrics(options: RouterOptions, process: Process, router: RouterComponents) -> Iterator[None]:
    if router.metrics is None:
        yield
        return
    loop = asyncio.get_running_loop()
    here = OwnerThreadReader(loop.call_soon_threadsafe, partial(_read_metrics, router))
    with export_metrics(options.telemetry, process, router.metrics.registry, here):
        yield


@asynccontextmanager
async def _http_server(
    options: RouterOptions, router: RouterComponents, health: Health
) -> AsyncIterator[None]:
    """Serve the HTTP APIs if a port is configured."""
    metrics = router.metrics
    if options.http_port is None or metrics is None:
        yield
        return
    # Imported late: routers that only serve gRPC do not need the HTTP stack.
    from baton.router.doors.error_formats import DEFAULT_ERRORS
    from baton.router.doors.http_app import WEBSOCKET_PATHS, http_app
    from baton.router.http.server import http_serving

    app = http_app(
        pipeline=router.pipeline,
        scopes=router.scopes,
        health=health,
        orders=router.orders,
        adapters=router.adapters,
        scrape=partial(exposition, metrics.registry),
        tokens=options.client_tokens,
        on_refusal=metrics.refused,
        cors=options.cors,
        embed_truncate=options.embed_truncate,
    )
    host = options.http_host or options.host
    async with http_serving(
        app,
        host,
        options.http_port,
        options.tls,
        DEFAULT_ERRORS,
        websocket_paths=WEBSOCKET_PATHS,
    ) as address:
        announce("http", address)
        yield


def _read_metrics(router: RouterComponents) -> Reading:
    return {
        metric_names.QUEUE_DEPTH: router.pipeline.traffic.num_waiting,
        metric_names.IN_FLIGHT: router.pipeline.traffic.num_in_flight,
        metric_names.OPEN_NODES: {
            kind.value: len(router.table.open_nodes(kind)) for kind in LegKind
        },
        metric_names.TRACES_LOST: router.tracer.num_lost,
    }


def _interceptors(
    options: RouterOptions, metrics: RouterMetrics | None
) -> Sequence[aio.ServerInterceptor]:
    if options.client_tokens is None:
        return ()
    on_refusal = ignore_refusal if metrics is None else metrics.refused
    if not options.tls.listens:
        log.warning("clients send their tokens in plain text; give --tls-cert and --tls-key")
    return (TokenInterceptor(options.client_tokens, on_refusal),)


async def _until_drained(server: Running, pipeline: Pipeline, deadline: ShutdownDeadline) -> None:
    """Drain on a signal. `deadline` then limits the rest of the process's life."""
    async with stop_signal() as stopped:
        freeze_heap()
        announce("router", server.address)
        await stopped.wait()
        traffic = pipeline.traffic
        deadline.begin(lambda: traffic.num_in_flight + traffic.num_waiting)
        await server.health.set_ready(False)
        await pipeline.drain()


if __name__ == "__main__":
    raise SystemExit("use `baton serve router`, which has the options")
