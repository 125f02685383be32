"""Components of a node, and their wiring."""

from __future__ import annotations

import secrets
from functools import partial
from importlib.metadata import version

from baton.checkpoint.hub import served_name
from baton.core.ids import Incarnation, NodeId
from baton.core.legs import LegKind, Legs
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.engine_thread import Compiler, EngineInbox, EngineThread
from baton.engine.factory import build_grammars, build_scheduler
from baton.engine.kv_arrival.arrivals import KvSources
from baton.engine.kv_arrival.pulls import PullConfig
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.loaded_runner import LoadedRunner, has_kv_cache
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.validation import max_sequence_length
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.layout import KvLayout
from baton.kv_transfer.pairs import Identity
from baton.kv_transfer.protocol.messages import Fingerprint
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from baton.kv_transfer.worker import KvTransferWorker
from baton.node.adapters.engine_adapters import EngineAdapters
from baton.node.adapters.loader import AdapterLoader
from baton.node.adapters.registry import AdapterRegistry
from baton.node.engine_calls import EngineCalls, NodeChanges
from baton.node.kv.connectors import make_connector, tiers_in
from baton.node.kv.events.part import make_publisher
from baton.node.kv.foreign.part import make_reader
from baton.node.kv.link import GrpcLinks
from baton.node.kv.tiers import CopyPacing
from baton.node.kv.worker import Around, KvPassHook, make_kv_worker
from baton.node.observers.tracing import NodeTracing
from baton.node.options import NodeOptions
from baton.node.part import MakePart
from baton.node.servicer import RequestLedger
from baton.node.state import NodeState, update_reader
from baton.rpc.node_info import NodeCard
from baton.telemetry.metrics.instruments import NodeMetrics
from baton.telemetry.tracing.node_timeline import NodeFacts
from baton.telemetry.tracing.tracer import Tracer

ID_BYTES = 4
MAKE_PARTS: tuple[MakePart, ...] = (make_publisher, make_reader)


class NodeComponents:
    """Long-lived objects of a node. Its servicers and its metrics are built from them.

    Create it on the asyncio loop.
    """

    def __init__(
        self,
        role: LegKind,
        options: NodeOptions,
        runner: LoadedRunner,
        identity: Identity,
        tracer: Tracer,
        around: Around,
    ) -> None:
        memory = runner.kv_memory
        block_bytes = 0 if memory is None else memory.block_bytes
        self.role = role.value
        self.options = options
        self.num_passes, self.read_collectives_s = runner.num_passes, runner.read_collectives_s
        self.tracing = _build_tracing(role, options, identity, tracer, block_bytes, runner)
        self.metrics = (
            NodeMetrics(role.value, self.tracing.handoff_context)
            if options.telemetry.counts
            else None
        )
        self._changes, self._inbox = NodeChanges(), EngineInbox()
        self.ledger = RequestLedger(self._changes.notify_threadsafe)
        self.links = GrpcLinks(options.tls)
        self.worker = self._make_worker(runner, identity, around)
        # What a connector holds may have changed with what the engine polls.
        report = partial(self._inbox.put, self._changes.notify_threadsafe)
        self.connector = make_connector(options, identity, runner, report)
        parts = (make(options, identity, runner, self._inbox.wake) for make in MAKE_PARTS)
        self.parts = [each for each in parts if each is not None]
        subscribers = [each.take_kv_events for each in self.parts if each.take_kv_events]
        engine_options = EngineOptions(
            options.scheduling,
            options.enable_prefix_caching,
            collect_kv_events=True,
            collect_token_ids=bool(subscribers),
        )
        # No other process uses this name of its pulls.
        pulls = PullConfig(f"pull-{identity.node_id}-{identity.incarnation}", block_bytes)
        foreign = next((each.foreign for each in self.parts if each.foreign), None)
        sources = KvSources(self.connector, foreign, pulls)
        self.scheduler = build_scheduler(runner, engine_options, sources)
        self.compiler: Compiler = GrammarCompiler(build_grammars(runner).compile)
        self.engine = self._build_engine(runner, identity)
        tiers = tiers_in(self.connector)
        if tiers is not None and self.metrics is not None:
            for tier in tiers.status():
                tier.counters.observe_load = self.metrics.count_loads_of(tier.name)
        card = _build_card(role, options, identity, runner, self.scheduler, tiers, block_bytes)
        self.adapters = self._build_adapters(runner.adapters, card.model)
        self.state = NodeState(
            card,
            EngineCalls(self.engine, self._changes),
            update_reader(self.engine, self.scheduler, tiers),
            subscribers,
            self.adapters,
        )

    def _make_worker(
        self, runner: LoadedRunner, identity: Identity, around: Around
    ) -> KvTransferWorker | None:
        if not has_kv_cache(runner):
            return None
        note_staged = None if self.metrics is None else self.metrics.note_staged
        worker = make_kv_worker(self.options, identity, runner, self.links, around, note_staged)
        self.links.attach(worker.inbox, self._inbox.wake)
        return worker

    def _build_engine(self, runner: LoadedRunner, identity: Identity) -> EngineThread:
        # Metrics before traces: with the end of a hand-off, the trace of its request may be
        # complete.
        counters = () if self.metrics is None else (self.metrics,)
        tiers = tiers_in(self.connector)
        pacing = () if tiers is None else (CopyPacing(tiers.pace),)
        observers = (self.ledger, *counters, *self.tracing.step_observers(), *pacing)
        core = EngineCore(
            self.scheduler,
            runner,
            self._drivers(),
            observers=observers,
        )
        name = identity.node_id
        engine = EngineThread(core, name=name, compiler=self.compiler, inbox=self._inbox)
        groups = self.scheduler.cache_config.layout.groups
        runner.hook = KvPassHook(self.worker, groups, engine.beat, core.post_from_pass)
        runner.when_lost(lambda error: engine.post(partial(_end, error)))
        return engine

    def _drivers(self) -> list[KvDriver]:
        drivers = (self.worker, self.connector, *(part.driver for part in self.parts))
        return [each for each in drivers if each is not None]

    def _build_adapters(self, table: AdapterTable | None, model: str) -> AdapterRegistry | None:
        """Raises ModelError and InvalidConfig for adapters that the options name."""
        if table is None:
            return None
        config, memory = self.options.adapters, EngineAdapters(table, self.scheduler, self.engine)
        loader = AdapterLoader(memory, config.num_places)
        adapters = AdapterRegistry(loader, config.root, model, self._changes.notify)
        if self.metrics is not None:
            loader.observe_load = self.metrics.observe_adapter_load
        adapters.read_at_start(config.adapters)
        return adapters


def _end(error: Exception) -> None:
    """End the engine, as an action of its thread."""
    raise error


def identify(options: NodeOptions, role: LegKind, runner: LoadedRunner) -> Identity:
    return Identity(
        node_id=NodeId(options.node_id or f"{role.value}-{secrets.token_hex(ID_BYTES)}"),
        incarnation=Incarnation(secrets.token_hex(ID_BYTES)),
        fingerprint=_fingerprint_of(runner),
    )


def _fingerprint_of(runner: LoadedRunner) -> Fingerprint:
    memory = runner.kv_memory
    layout = KvLayout(runner.info.dtype) if memory is None else memory.blocks
    return Fingerprint(runner.info.fingerprint, layout)


def _build_card(
    role: LegKind,
    options: NodeOptions,
    identity: Identity,
    runner: LoadedRunner,
    scheduler: Scheduler,
    tiers: TieredKv | None,
    block_bytes: int,
) -> NodeCard:
    cache, rows = scheduler.cache_config, scheduler.config.stored_rows
    return NodeCard(
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        legs=_legs_of(role, runner),
        fingerprint=identity.fingerprint,
        model=options.model_name or served_name(options.runner.model),
        max_model_len=runner.info.max_model_len,
        vocab_size=runner.info.vocab_size,
        num_blocks=cache.num_blocks,
        block_bytes=block_bytes,
        kv_transport=options.kv_transport,
        prefix_naming=cache.naming if cache.enable_prefix_caching else None,
        version=version("baton"),
        sampling_defaults=runner.info.defaults.sampling,
        max_num_seqs=options.scheduling.max_num_seqs,
        max_sequence_len=max_sequence_length(scheduler.config, cache),
        kv_staging_bytes=options.staging_bytes,
        num_host_blocks=0 if tiers is None else tiers.host.memory.num_blocks,
        vector_size=runner.info.vector_size,
        has_labels=runner.info.has_labels,
        pools_tokens=runner.info.pools_tokens,
        generates=runner.info.can_generate,
        encodes_pictures=runner.info.encodes_pictures,
        encoding_row_bytes=0 if rows is None else rows.row_bytes,
        follows_predictions=runner.speculation is not None,
        logprobs_mode=options.runner.logprobs_mode,
        kernels=runner.info.kernels,
        max_loras=scheduler.config.max_loras,
        num_ranks=options.runner.tensor_parallel_size,
        prompt_embeds_size=runner.info.hidden_size if runner.info.takes_prompt_embeds else 0,
    )


def _legs_of(role: LegKind, runner: LoadedRunner) -> Legs:
    """Return what a node of this role can do with its model."""
    if not runner.info.has_decoder:
        return (LegKind.ENCODE,)
    encoding = (LegKind.ENCODE,) if runner.info.vector_size else ()
    return (*encoding, role) if runner.info.can_generate else encoding


def _build_tracing(
    role: LegKind,
    options: NodeOptions,
    identity: Identity,
    tracer: Tracer,
    block_bytes: int,
    runner: LoadedRunner,
) -> NodeTracing:
    facts = NodeFacts(
        role=role.value,
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        verifies_kv=options.kv_worker.verify,
        block_bytes=block_bytes,
    )
    return NodeTracing(tracer, facts, options.trace_step_ratio, runner.read_collectives_s)
