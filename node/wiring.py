"""Components of a node, and their wiring. It is the same for both roles."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from baton.checkpoint.hub import served_name
from baton.core.ids import Incarnation, NodeId
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore, KvWorkerWithExternal
from baton.engine.engine_thread import Compiler, EngineInbox, EngineThread
from baton.engine.factory import build_grammars, build_scheduler
from baton.engine.kv_arrival.pulls import PullConfig
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.validation import max_sequence_length
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.kv_transfer.kv_connector import GuardedConnector
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.kv_transfer.worker import KvTransferWorker
from baton.node.engine_calls import EngineCalls, NodeChanges
from baton.node.kv.connectors import make_connector, tiers_in
from baton.node.kv.events.messages import CacheFacts, spec_kind_of
from baton.node.kv.events.publisher import KvEventPublisher
from baton.node.kv.link import GrpcLinks
from baton.node.kv.tiers import CopyPacing
from baton.node.kv.worker import Around, KvPassHook, make_kv_worker
from baton.node.observers.ledger import RequestLedger
from baton.node.observers.tracing import NodeTracing
from baton.node.options import NodeOptions
from baton.node.state import NodeState, update_reader
from baton.rpc.node_info import NodeCard, NodeRole
from baton.telemetry.metrics.instruments import NodeMetrics
from baton.telemetry.tracing.node_timeline import NodeFacts
from baton.telemetry.tracing.tracer import Tracer

# The axes inside one block, outermost first, by the number of tensors per layer.
KV_LAYOUTS = {1: "layer,latent,token,dim", 2: "layer,kv,head,token,dim"}
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class NodeComponents:
    """Long-lived objects of a node. Its servicers and its metrics are built from them."""

    options: NodeOptions
    links: GrpcLinks
    worker: KvTransferWorker
    connector: GuardedConnector | None
    scheduler: Scheduler
    compiler: Compiler
    engine: EngineThread
    ledger: RequestLedger
    tracing: NodeTracing
    metrics: NodeMetrics | None
    kv_events: KvEventPublisher | None
    state: NodeState


def build_components(
    role: NodeRole,
    options: NodeOptions,
    runner: TorchRunner,
    identity: Identity,
    tracer: Tracer,
    around: Around,
) -> NodeComponents:
    """Build and connect a node's components. Call this on the asyncio loop."""
    tracing = _build_tracing(role, options, identity, tracer, runner.kv_memory.block_bytes)
    metrics = _build_metrics(role, options, tracing)
    changes, inbox = NodeChanges(), EngineInbox()
    links, ledger = GrpcLinks(options.tls), RequestLedger(changes.notify_threadsafe)
    worker = make_kv_worker(options, identity, runner, links, around)
    wake = partial(_wake, inbox, changes)
    connector = make_connector(options, identity, runner, wake)
    pulls = PullConfig(_pull_name(identity), runner.kv_memory.block_bytes)
    scheduler = build_scheduler(runner, _engine_options(options), connector, pulls)
    # Metrics before traces: with the end of a hand-off, the trace of its request may be complete.
    counters = () if metrics is None else (metrics,)
    tiers = tiers_in(connector)
    pacing = () if tiers is None else (CopyPacing(tiers.pace),)
    observers = (ledger, *counters, *tracing.step_observers(), *pacing)
    both = worker if connector is None else KvWorkerWithExternal(worker, connector)
    core = EngineCore(scheduler, runner, both, observers=observers)
    compiler: Compiler = GrammarCompiler(build_grammars(runner))
    engine = EngineThread(core, name=identity.node_id, compiler=compiler, inbox=inbox)
    runner.hook = KvPassHook(worker, runner.kv_memory.layout.groups, engine.beat)
    links.attach(worker.inbox, partial(inbox.put, _poll))
    calls = EngineCalls(engine, changes)
    if tiers is not None and metrics is not None:
        for tier in tiers.status():
            tier.counters.observe_load = metrics.count_loads_of(tier.name)
    card = _build_card(role, options, identity, runner, scheduler, tiers)
    kv_events = _build_kv_events(options, identity, runner, scheduler)
    reader = update_reader(engine, scheduler, tiers)
    listeners = () if kv_events is None else (kv_events.publish,)
    state = NodeState(card, calls, reader, *listeners)
    return NodeComponents(
        options=options,
        links=links,
        worker=worker,
        connector=connector,
        scheduler=scheduler,
        compiler=compiler,
        engine=engine,
        ledger=ledger,
        tracing=tracing,
        metrics=metrics,
        kv_events=kv_events,
        state=state,
    )


def _pull_name(identity: Identity) -> str:
    """Return the name of this process's pulls, which no other process uses."""
    return f"pull-{identity.node_id}-{identity.incarnation}"


def _wake(inbox: EngineInbox, changes: NodeChanges) -> None:
    """Let the engine poll the KV connector, and the node report what it holds. On any thread."""
    inbox.put(_poll)
    changes.notify_threadsafe()


def _poll() -> None:
    """Do nothing: each step polls the KV worker and the KV connector."""


def identify(options: NodeOptions, role: NodeRole, runner: TorchRunner) -> Identity:
    memory = runner.kv_memory
    return Identity(
        node_id=NodeId(options.node_id or f"{role.value}-{secrets.token_hex(ID_BYTES)}"),
        incarnation=Incarnation(secrets.token_hex(ID_BYTES)),
        fingerprint=Fingerprint(
            model=runner.info.fingerprint,
            dtype=memory.dtype,
            layout=KV_LAYOUTS[memory.num_tensors],
            block_size=memory.block_size,
            num_layers=memory.num_layers,
            num_kv_heads=memory.num_kv_heads,
            head_dim=memory.head_dim,
            kv_groups=str(memory.layout),
        ),
    )


def _build_card(
    role: NodeRole,
    options: NodeOptions,
    identity: Identity,
    runner: TorchRunner,
    scheduler: Scheduler,
    tiers: TieredKv | None,
) -> NodeCard:
    return NodeCard(
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        role=role,
        fingerprint=identity.fingerprint,
        model=options.model_name or served_name(options.runner.model),
        max_model_len=runner.info.max_model_len,
        vocab_size=runner.info.vocab_size,
        num_blocks=runner.kv_memory.num_blocks,
        block_bytes=runner.kv_memory.block_bytes,
        kv_transport=options.kv_transport,
        prefix_naming=scheduler.cache_config.naming if options.enable_prefix_caching else None,
        version=version("baton"),
        sampling_defaults=runner.info.defaults.sampling,
        max_num_seqs=options.scheduling.max_num_seqs,
        max_sequence_len=max_sequence_length(scheduler.config, scheduler.cache_config),
        kv_staging_bytes=options.kv_staging_bytes,
        num_host_blocks=0 if tiers is None else tiers.host.memory.num_blocks,
    )


def _build_tracing(
    role: NodeRole, options: NodeOptions, identity: Identity, tracer: Tracer, block_bytes: int
) -> NodeTracing:
    facts = NodeFacts(
        leg=role.value,
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        verifies_kv=options.kv_worker.verify,
        block_bytes=block_bytes,
    )
    return NodeTracing(tracer, facts, options.trace_step_ratio)


def _build_metrics(
    role: NodeRole, options: NodeOptions, tracing: NodeTracing
) -> NodeMetrics | None:
    return NodeMetrics(role.value, tracing.handoff_context) if options.telemetry.counts else None


def _build_kv_events(
    options: NodeOptions, identity: Identity, runner: TorchRunner, scheduler: Scheduler
) -> KvEventPublisher | None:
    if not options.kv_events.is_on:
        return None
    memory, naming = runner.kv_memory, scheduler.cache_config.naming
    kind = spec_kind_of(memory.layout, is_latent=memory.num_tensors == 1)
    window = memory.layout.groups[0].spec.window
    facts = CacheFacts(memory.block_size, naming.root(), kind, window)
    config = options.kv_events.for_node(identity.node_id, options.host)
    return KvEventPublisher(config, facts)


def _engine_options(options: NodeOptions) -> EngineOptions:
    return EngineOptions(
        options.scheduling,
        options.enable_prefix_caching,
        collect_kv_events=True,
        collect_token_ids=options.kv_events.is_on,
    )
