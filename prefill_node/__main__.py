"""Prefill node: computes prompts and pushes their KV to decode nodes. Wires all objects."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton.v1 import kv_link_pb2_grpc, node_pb2_grpc
from engine.engine_thread import Compiler, EngineThread
from engine.factory import build_grammars, build_scheduler
from engine.runner.load import load_runner
from engine.runner.model_runner import TorchRunner
from engine.structured_output.compiler import GrammarCompiler
from kv_transfer.pairs import Identity
from node.drain import serve_until_drained
from node.engine_calls import EngineCalls
from node.kv_link import GrpcLinks
from node.ledger import LedgerKvWorker, LedgerRunner, RequestLedger
from node.metrics import node_metrics
from node.options import NodeOptions
from node.servicer import KvLinkServicer, NodeServicer
from node.state import NodeState
from node.status_feed import prefix_cache_resetter, update_reader
from node.wiring import (
    NO_NODE_DECORATORS,
    Around,
    KvPassHook,
    card_of,
    engine_options,
    identify,
    log_start,
    make_kv_worker,
    pin,
    process_of,
    trace_node,
)
from prefill_node.sends import PendingSends
from prefill_node.servicer import PrefillServicer
from rpc.grace_period import ShutdownDeadline
from rpc.listening import check_port
from rpc.node_info import NodeRole
from rpc.server import Service, serving
from telemetry.tracing.tracer import Tracer, tracing


def main(options: NodeOptions, around: Around = NO_NODE_DECORATORS) -> None:
    """Serve until SIGTERM or a Drain call. Raise a named error if the options cannot work."""
    check_port(options.host, options.port)  # before the model is loaded
    pin(options.cpus)
    # No speculation: requests end with their first token.
    with load_runner(replace(options.runner, speculation=None)) as runner:
        identity = identify(options, NodeRole.PREFILL, runner)
        with tracing(options.telemetry, process_of(NodeRole.PREFILL, identity)) as tracer:
            asyncio.run(serve(options, runner, identity, tracer, around))


async def serve(
    options: NodeOptions,
    runner: TorchRunner,
    identity: Identity,
    tracer: Tracer,
    around: Around = NO_NODE_DECORATORS,
) -> None:
    traced = trace_node(options, NodeRole.PREFILL, identity, tracer)
    links, ledger = GrpcLinks(options.tls), RequestLedger(runner.kv_memory.block_size)
    worker = make_kv_worker(options, identity, runner, links, around)
    scheduler = build_scheduler(runner, engine_options(options))
    core = traced.core(
        scheduler,
        LedgerRunner(traced.runner(runner), ledger),
        LedgerKvWorker(traced.kv_worker(worker), ledger),
    )
    compiler: Compiler = GrammarCompiler(build_grammars(runner))
    engine = EngineThread(core, name=identity.node_id, compiler=compiler)
    runner.hook = KvPassHook(worker, engine.beat)
    links.attach(worker, engine.post)
    sends = PendingSends(
        lambda handoff_id: engine.post(
            lambda: scheduler.withdraw_completed(handoff_id, "the call was cancelled")
        )
    )
    ledger.set_sent_callback(sends.ended)
    calls = EngineCalls(engine)
    ledger.set_change_callback(calls.notify_from_engine)
    card = card_of(options, NodeRole.PREFILL, identity, runner, scheduler)
    log_start(card, runner)
    state = NodeState(card, calls, update_reader(engine, scheduler))
    prefill, node, link = (
        PrefillServicer(state, sends, traced),
        NodeServicer(state, prefix_cache_resetter(engine, scheduler)),
        KvLinkServicer(links),
    )
    services = (
        Service(
            "baton.v1.PrefillService",
            lambda server: node_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server),
        ),
        Service(
            "baton.v1.NodeService",
            lambda server: node_pb2_grpc.add_NodeServiceServicer_to_server(node, server),
        ),
        Service(
            "baton.v1.KvLinkService",
            lambda server: kv_link_pb2_grpc.add_KvLinkServiceServicer_to_server(link, server),
        ),
    )
    process = process_of(NodeRole.PREFILL, identity)
    metrics = node_metrics(options, process, traced, engine, scheduler, worker)
    # On exit, the worker stops before links and server, which carry its last messages.
    with ShutdownDeadline(options.drain_timeout_s) as grace:
        async with serving(options.host, options.port, services, tls=options.tls) as server, links:
            with worker, compiler, engine, calls, metrics:
                await serve_until_drained(server, state, engine, options.stuck_after_s, grace)
