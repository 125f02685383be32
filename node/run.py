"""Life of a node: load the model, serve, drain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

from baton.checkpoint.peft_folder import PeftFolder
from baton.core.errors import InvalidRequest, NamedError
from baton.core.ids import HandoffId
from baton.core.legs import LegKind
from baton.core.units import format_bytes
from baton.decode_node.peer_warmup import PeerWarmup, read_legs
from baton.engine.errors import EngineStopped
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.loaded_runner import LoadedRunner
from baton.engine.runner.model_info import LoadProgress
from baton.engine.runner.open_runner import open_runner
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.transports.nixl import import_nixl
from baton.node.engine_calls import run_on_engine
from baton.node.kv.connectors import find_connector, shared_tiers_of
from baton.node.kv.events.part import check_endpoints
from baton.node.kv.foreign.part import check_libraries
from baton.node.kv.tiers import check_tiers
from baton.node.kv.worker import NO_NODE_DECORATORS, Around
from baton.node.observers.metrics import export_node_metrics
from baton.node.operator_orders import reset_prefix_cache, set_pause
from baton.node.options import NodeOptions
from baton.node.servicer import CallServer, KvLinkServicer, LegServicer, NodeServicer
from baton.node.state import NodeState
from baton.node.wiring import NodeComponents, identify
from baton.prefill_node.leg import PrefillLegs
from baton.rpc.health import Health
from baton.rpc.listening import check_port
from baton.rpc.process_end import ShutdownDeadline
from baton.rpc.security.token import Operators
from baton.rpc.server import Running, Service, announce, freeze_heap, serving, stop_signal
from baton.telemetry.resource import Process
from baton.telemetry.tracing.tracer import Tracer, tracing
from baton.v1 import kv_link_pb2_grpc, node_pb2_grpc

log = logging.getLogger(__name__)

LOAD_LOG_S = 2.0
HEARTBEAT_CHECK_S = 0.5
# Multiple of `stuck_after_s` without a heartbeat after which the process counts as dead.
DEAD_FACTOR = 5
# Of optional parts. Raise named errors for settings that cannot work.
PART_CHECKS: tuple[Callable[[NodeOptions], None], ...] = (check_endpoints, check_libraries)


def run(role: LegKind, options: NodeOptions, around: Around = NO_NODE_DECORATORS) -> None:
    """Serve until SIGTERM or a Drain call. Raise a named error if the options cannot work.

    `role` is the kind of leg that the node offers beside those that any node can offer.
    """
    _check_start(options)
    with open_runner(_parts_for(role, options), LoadLog(time.monotonic)) as runner:
        identity = identify(options, role, runner)
        process = Process(role.value, identity.node_id, identity.incarnation)
        with tracing(options.telemetry, process) as tracer:
            asyncio.run(
                serve(process, options, runner, identity, tracer, around, on_ready=freeze_heap)
            )


def _parts_for(role: LegKind, options: NodeOptions) -> RunnerConfig:
    """Return what to load. Decode nodes get the KV of pictures, and no pixels."""
    config = options.runner_config
    if role is LegKind.DECODE:
        return replace(config, loads_tower=False)
    return replace(config, loads_decoder=False) if role is LegKind.ENCODE else config


class LoadLog:
    """Logs how much of the weights is loaded, a line every `LOAD_LOG_S` seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_s = clock() + LOAD_LOG_S

    def __call__(self, load: LoadProgress) -> None:
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + LOAD_LOG_S
            percent = 100 * load.loaded_bytes // max(1, load.total_bytes)
            log.info("loaded %d %% of the weights", percent)


def _check_start(options: NodeOptions) -> None:
    """Raise a named error for what cannot work on this machine, whatever the weights are.

    Loading the weights, which comes next, can take minutes.
    """
    connector = options.chosen_connector
    if connector is not None:
        find_connector(connector.name)
        if connector.name == "tiers":
            check_tiers(connector.config)
    if options.kv_transport == "nixl":
        import_nixl()
    if options.telemetry.metrics_port is not None:
        check_port(options.telemetry.metrics_host, options.telemetry.metrics_port, "--metrics-port")
    for adapter in options.adapters.adapters:
        PeftFolder(adapter.folder)
    for check in PART_CHECKS:
        check(options)


async def serve(
    process: Process,
    options: NodeOptions,
    runner: LoadedRunner,
    identity: Identity,
    tracer: Tracer,
    around: Around = NO_NODE_DECORATORS,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    node = NodeComponents(LegKind(process.role), options, runner, identity, tracer, around)
    _log_start(node.state, runner)
    services = _services(node)
    metrics = export_node_metrics(process, node)
    # On exit, the worker stops before links and server, which carry its last messages.
    with ShutdownDeadline(options.drain_timeout_s) as grace:
        async with (
            serving(options.host, options.port, services, tls=options.tls) as server,
            node.links,
        ):
            adapters = None if node.adapters is None else node.adapters.loader
            parts = (part.running for part in node.parts)
            running: tuple[AbstractContextManager[object] | None, ...] = (
                *(node.connector, *parts, adapters, node.worker, node.compiler),
                *(node.engine, node.state.calls, metrics),
            )
            with ExitStack() as stack:
                for each in filter(None, running):
                    stack.enter_context(each)
                on_ready()
                await _serve_until_drained(server, node, grace)


async def _serve_until_drained(
    server: Running, node: NodeComponents, grace: ShutdownDeadline
) -> None:
    """Serve until a signal, a drain request or an engine failure; then drain.

    The drain starts the time limit of `grace`, which covers the rest of the process's life.
    Raises EngineStopped if the engine fails.
    """
    state, engine, stuck_after_s = node.state, node.engine, node.options.stuck_after_s
    async with stop_signal() as stop_requested:
        heartbeat = asyncio.ensure_future(follow_heartbeat(engine, server.health, stuck_after_s))
        publishing = asyncio.ensure_future(state.publish_updates())
        stop = asyncio.ensure_future(stop_requested.wait())
        drain = asyncio.ensure_future(state.wait_for_drain_request())
        tasks = heartbeat, publishing, stop, drain
        try:
            announce(node.role, server.address)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if publishing.done() and engine.failure is None:
                publishing.result()  # raises: it ends only by a bug, or with the engine
            grace.begin(lambda: state.num_calls)
            heartbeat.cancel()
            if engine.failure is None:
                state.request_drain()
            await server.health.set_ready(False)
            if engine.failure is None:
                await state.wait_until_idle()
        finally:
            for task in tasks:
                task.cancel()
    if engine.failure is not None:
        is_named = isinstance(engine.failure, NamedError)
        raise EngineStopped(
            f"the engine failed: {engine.failure if is_named else repr(engine.failure)}"
        )


class HasHeartbeat(Protocol):
    @property
    def failure(self) -> BaseException | None: ...

    def seconds_since_heartbeat(self) -> float: ...


async def follow_heartbeat(
    engine: HasHeartbeat, health: Health, stuck_after_s: float
) -> BaseException:
    """Update `health` from the heartbeat until the engine fails. Return the engine's failure."""
    while engine.failure is None:
        silence_s = engine.seconds_since_heartbeat()
        health.is_alive = silence_s < DEAD_FACTOR * stuck_after_s
        is_ready = silence_s < stuck_after_s
        if health.is_ready and not is_ready:
            log.warning(
                "no heartbeat of the engine for %.1f s: not ready until the next", silence_s
            )
        await health.set_ready(is_ready)
        await asyncio.sleep(HEARTBEAT_CHECK_S)
    await health.set_ready(False)
    return engine.failure


def _services(node: NodeComponents) -> tuple[Service, ...]:
    def withdraw(handoff_id: HandoffId) -> None:
        reason = "the call was cancelled"
        node.engine.post(lambda: node.scheduler.withdraw_completed(handoff_id, reason))

    prefills = PrefillLegs(withdraw)
    node.ledger.on_sent = prefills.mark_sent
    calls = CallServer(node.state, node.ledger, prefills, node.tracing)
    warmup = PeerWarmup(partial(read_legs, node.options.tls), partial(_link_up, node))
    legs = LegServicer(calls, node.state, warmup.connect)
    servicer = NodeServicer(
        node.state,
        partial(reset_prefix_cache, node.engine, node.scheduler),
        partial(set_pause, node.engine, node.scheduler),
        Operators(node.options.operator_tokens),
        shared_tiers_of(node.connector),
    )
    add_node = partial(node_pb2_grpc.add_NodeServiceServicer_to_server, servicer)
    add_legs = partial(node_pb2_grpc.add_LegServiceServicer_to_server, legs)
    return (
        Service("baton.v1.LegService", add_legs),
        Service("baton.v1.NodeService", add_node),
        *_link_services(node),
    )


def _link_services(node: NodeComponents) -> tuple[Service, ...]:
    if node.worker is None:
        return ()
    link = KvLinkServicer(node.links)
    add_link = partial(kv_link_pb2_grpc.add_KvLinkServiceServicer_to_server, link)
    return (Service("baton.v1.KvLinkService", add_link),)


async def _link_up(node: NodeComponents, address: str) -> None:
    """Open a link to the node at this address, on the engine's thread. Raises InvalidRequest."""
    worker = node.worker
    if worker is None:
        raise InvalidRequest("this node has no KV cache: its model keeps nothing of a text")
    await run_on_engine(node.engine, lambda: worker.connect(address, time.monotonic()))


def _log_start(state: NodeState, runner: LoadedRunner) -> None:
    card, memory = state.card, runner.kv_memory
    if memory is None:
        text = "%s serves %s (%s); no KV cache: each text is computed whole, in one step"
        log.info(text, card.node_id, card.model, runner.info.dtype)
        return
    log.info(
        "%s serves %s (%s on %s); KV cache: %.1f MiB, %d blocks, %d tokens; "
        "host memory for evicted KV: up to %s; "
        "at most %d tokens a request, prompt and answer (the model: %d); KV over %s",
        card.node_id,
        card.model,
        memory.blocks.cache_dtype,
        memory.device,
        memory.num_bytes / 2**20,
        memory.num_blocks,
        memory.num_tokens,
        format_bytes(card.num_host_blocks * card.block_bytes),
        card.max_sequence_length,
        card.max_model_len,
        card.kv_transport,
    )
