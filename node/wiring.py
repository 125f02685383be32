"""Builders for the components that prefill and decode nodes share."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version

from engine.errors import InvalidConfig
from engine.factory import EngineOptions
from engine.runner.model_runner import TorchRunner
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.validation import max_sequence_length
from kv_transfer.fence import Fence
from kv_transfer.link import Link
from kv_transfer.pairs import Identity
from kv_transfer.protocol.messages import Fingerprint, Region
from kv_transfer.transports.base import Transport
from kv_transfer.transports.nixl import NixlConfig, NixlTransport
from kv_transfer.transports.ucxx import UcxxConfig, UcxxTransport
from kv_transfer.types import Incarnation, NodeId
from kv_transfer.worker import KvTransferWorker
from node.options import KV_TRANSPORTS, NodeOptions
from node.tracing import NodeTracing
from rpc.node_info import NodeCard, NodeRole
from telemetry.metrics.instruments import NodeMetrics
from telemetry.resource import Process
from telemetry.tracing.node_timeline import NodeFacts
from telemetry.tracing.tracer import Tracer

# The axes inside one block, outermost first.
KV_LAYOUT = "layer,kv,head,token,dim"
ID_BYTES = 4

log = logging.getLogger(__name__)


def pin(cpus: tuple[int, ...]) -> None:
    """Set the process's CPU affinity. Raises InvalidConfig.

    Call it before any thread starts, since threads inherit the affinity.
    """
    if not cpus:
        return
    allowed = os.sched_getaffinity(0)
    with suppress(OSError):  # raised if no CPU of them exists; single missing ones are ignored
        os.sched_setaffinity(0, cpus)
    if os.sched_getaffinity(0) != set(cpus):
        wanted, free = (",".join(map(str, sorted(some))) for some in (cpus, allowed))
        raise InvalidConfig(f"--cpus {wanted}: not all are available; choose from {free}")


def identify(options: NodeOptions, role: NodeRole, runner: TorchRunner) -> Identity:
    memory = runner.kv_memory
    return Identity(
        node_id=NodeId(options.node_id or f"{role.value}-{secrets.token_hex(ID_BYTES)}"),
        incarnation=Incarnation(secrets.token_hex(ID_BYTES)),
        fingerprint=Fingerprint(
            model=runner.info.fingerprint,
            dtype=memory.dtype,
            layout=KV_LAYOUT,
            block_size=memory.block_size,
            num_layers=memory.num_layers,
            num_kv_heads=memory.num_kv_heads,
            head_dim=memory.head_dim,
        ),
    )


def card_of(
    options: NodeOptions,
    role: NodeRole,
    identity: Identity,
    runner: TorchRunner,
    scheduler: Scheduler,
) -> NodeCard:
    return NodeCard(
        node_id=identity.node_id,
        incarnation=identity.incarnation,
        role=role,
        fingerprint=identity.fingerprint,
        model=options.model_name or runner.info.folder.name,
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
    )


def process_of(role: NodeRole, identity: Identity) -> Process:
    return Process(role.value, identity.node_id, identity.incarnation)


def trace_node(
    options: NodeOptions, role: NodeRole, identity: Identity, tracer: Tracer
) -> NodeTracing:
    facts = NodeFacts(role.value, identity.node_id, identity.incarnation, options.kv_verify)
    metrics = NodeMetrics(role.value) if options.telemetry.counts else None
    return NodeTracing(tracer, facts, metrics, options.trace_step_ratio)


def log_start(card: NodeCard, runner: TorchRunner) -> None:
    memory = runner.kv_memory
    log.info(
        "%s serves %s (%s on %s); KV cache: %.1f MiB, %d blocks, %d tokens; "
        "at most %d tokens a request, prompt and answer (the model: %d); KV over %s",
        card.node_id,
        card.model,
        memory.dtype,
        memory.device,
        memory.num_bytes / 2**20,
        memory.num_blocks,
        memory.num_tokens,
        card.max_sequence_length,
        card.max_model_len,
        card.kv_transport,
    )


def region_of(runner: TorchRunner) -> Region:
    memory = runner.kv_memory
    return Region(memory.address, memory.num_blocks, memory.block_bytes, memory.device)


@dataclass(frozen=True, slots=True)
class Around:
    """Decorators of a node's link and transport, such as fault injection."""

    link: Callable[[Link], Link] = lambda link: link
    transport: Callable[[Transport, Region], Transport] = lambda transport, _: transport


NO_NODE_DECORATORS = Around()


def make_kv_worker(
    options: NodeOptions,
    identity: Identity,
    runner: TorchRunner,
    link: Link,
    around: Around = NO_NODE_DECORATORS,
) -> KvTransferWorker:
    """Raises TransportMissing if the transport's library is not installed."""
    region = region_of(runner)
    config = replace(options.kv_worker, verify=options.kv_verify, busy_s=options.stuck_after_s)
    transport = around.transport(_open_transport(options, region), region)
    read = None if region.device == "cpu" else runner.read_blocks
    return KvTransferWorker(
        identity, region, transport, around.link(link), config, read_blocks=read
    )


class KvPassHook:
    """Forward-pass hook that drives KV transfers and the heartbeat during long steps."""

    def __init__(self, worker: KvTransferWorker, beat: Callable[[], None]) -> None:
        self._worker = worker
        self._beat = beat

    def layer_done(self, layer: int, fence: Fence) -> None:
        self._beat()
        self._worker.layer_done(layer, time.monotonic(), fence)

    def pass_done(self) -> None:
        self._beat()
        self._worker.pass_done(time.monotonic())


def _open_transport(options: NodeOptions, region: Region) -> Transport:
    if options.kv_transport == "nixl":
        return NixlTransport(region, NixlConfig(options.kv_tls, options.kv_device))
    if options.kv_transport == "ucxx":
        return UcxxTransport(region, UcxxConfig(options.kv_tls, options.kv_device))
    known = ", ".join(KV_TRANSPORTS)
    raise InvalidConfig(
        f"no KV transport is called {options.kv_transport!r}; choose one of: {known}"
    )


def engine_options(options: NodeOptions) -> EngineOptions:
    scheduling = replace(options.scheduling, push_layers=options.pushes_layers)
    return EngineOptions(scheduling, options.enable_prefix_caching, collect_kv_events=True)
