"""Decode node: receives KV from prefill nodes and decodes. Wires all objects."""

from __future__ import annotations

import asyncio

from baton.v1 import node_pb2_grpc
from decode_node.servicer import DecodeServicer
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
from node.peer_warmup import PeerWarmup, link_by_engine, role_over_grpc
from node.servicer import NodeServicer
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
from rpc.grace_period import ShutdownDeadline
from rpc.listening import check_port
from rpc.node_info import NodeRole
from rpc.server import Service, serving
from telemetry.tracing.tracer import Tracer, tracing


def main(options: NodeOptions, around: Around = NO_NODE_DECORATORS) -> None:
    """Serve until SIGTERM or a Drain call. Raise a named error if the options cannot work."""
    check_port(options.host, options.port)  # before the model is loaded
    pin(options.cpus)
    with load_runner(options.runner) as runner:
        identity = identify(options, NodeRole.DECODE, runner)
        with tracing(options.telemetry, process_of(NodeRole.DECODE, identity)) as tracer:
            asyncio.run(serve(options, runner, identity, tracer, around))


async def serve(
    options: NodeOptions,
    runner: TorchRunner,
    identity: Identity,
    tracer: Tracer,
    around: Around = NO_NODE_DECORATORS,
) -> None:
    traced = trace_node(options, NodeRole.DECODE, identity, tracer)
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
    calls = EngineCalls(engine)
    ledger.set_change_callback(calls.notify_from_engine)
    card = card_of(options, NodeRole.DECODE, identity, runner, scheduler)
    log_start(card, runner)
    state = NodeState(card, calls, update_reader(engine, scheduler))
    warmup = PeerWarmup(role_over_grpc(options.tls), link_by_engine(engine, worker))
    decode = DecodeServicer(state, ledger, warmup.connect, traced)
    node = NodeServicer(state, prefix_cache_resetter(engine, scheduler))
    services = (
        Service(
            "baton.v1.DecodeService",
            lambda server: node_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server),
        ),
        Service(
            "baton.v1.NodeService",
            lambda server: node_pb2_grpc.add_NodeServiceServicer_to_server(node, server),
        ),
    )
    process = process_of(NodeRole.DECODE, identity)
    metrics = node_metrics(options, process, traced, engine, scheduler, worker)
    # On exit, the worker stops before links and server, which carry its last messages.
    with ShutdownDeadline(options.drain_timeout_s) as grace:
        async with serving(options.host, options.port, services, tls=options.tls) as server, links:
            with worker, compiler, engine, calls, metrics:
                await serve_until_drained(server, state, engine, options.stuck_after_s, grace)
