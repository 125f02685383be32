"""`baton serve router|prefill|decode`: one process of a cluster."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from baton.cli.command import Group
from baton.cli.options.batching import (
    ChunkedPrefill,
    LogitsProcessors,
    LongPrefill,
    MaxLongPartialPrefills,
    MaxNumSeqs,
    MaxPartialPrefills,
    MaxTokens,
    SchedulingPolicy,
    Speculative,
    TargetStep,
)
from baton.cli.options.kv_cache import (
    BlockSize,
    KvDtype,
    KvFolder,
    KvFolderSize,
    KvHostMemory,
    KvLease,
    KvLoadFailure,
    KvMemory,
    KvNetDevice,
    KvObjectStore,
    KvObjectStoreSize,
    KvSilence,
    KvStaging,
    KvTenantShare,
    KvTierAdmission,
    KvTls,
    KvVerify,
    NodesPerMachine,
    PrefixCaching,
    Push,
    RemoteHeadroom,
    Transport,
)
from baton.cli.options.kv_connector import (
    KvConnectorName,
    KvConnectorSettings,
    parse_connector_config,
)
from baton.cli.options.kv_events import kv_events_config
from baton.cli.options.lists import parse_cpus
from baton.cli.options.model import (
    Cpus,
    Device,
    Dtype,
    Kernels,
    MaxModelLen,
    Model,
    ModelName,
    Quantize,
    ReasoningParser,
    Threads,
    ToolParser,
)
from baton.cli.options.network import (
    DrainTimeout,
    FindEvery,
    Host,
    HttpHost,
    HttpPort,
    NodeName,
    NodePatience,
    Nodes,
    ParentPid,
    Port,
    StuckAfter,
)
from baton.cli.options.output import LogFormat, LogLevel
from baton.cli.options.routing import KvPulls, LocalPrefill, MaxInFlight, MaxQueue, Policy
from baton.cli.options.security import (
    OperatorTokenFile,
    RouterTokenFile,
    operator_tokens,
    tls_config,
)
from baton.cli.options.telemetry import TraceStepRatio, telemetry_options
from baton.cli.signatures import inherit_options, split
from baton.node.cpus import pin_to_cpus
from baton.rpc.descriptors import raise_descriptor_limit
from baton.rpc.grace_period import DRAIN_TIMEOUT_S
from baton.rpc.listening import check_port
from baton.rpc.parent_process import end_with_parent, exit_on_sigterm
from baton.telemetry.logs import configure_logging
from baton.units import AUTO, parse_bytes, parse_kv_memory

if TYPE_CHECKING:
    from baton.node.options import NodeOptions
    from baton.router.__main__ import RouterOptions

LONG_PREFILL_TOKEN_THRESHOLD = 512

serve = typer.Typer(cls=Group, help="Run one process of a cluster.", no_args_is_help=True)


@inherit_options(tls_config, telemetry_options, kv_events_config)
def node_options(
    model: Model,
    served_model_name: ModelName = "",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    device: Device = "cpu",
    threads: Threads = None,
    kernels: Kernels = "auto",
    quantize: Quantize = "none",
    cpus: Cpus = "",
    kv_cache_memory: KvMemory = AUTO,
    nodes_per_machine: NodesPerMachine = None,
    block_size: BlockSize = 16,
    kv_cache_dtype: KvDtype = "auto",
    kv_staging_memory: KvStaging = "0",
    kv_host_memory: KvHostMemory = "0",
    kv_folder: KvFolder = "",
    kv_folder_size: KvFolderSize = "10GiB",
    kv_object_store: KvObjectStore = "",
    kv_object_store_size: KvObjectStoreSize = "1TiB",
    kv_connector: KvConnectorName = "",
    kv_connector_config: KvConnectorSettings = "",
    kv_tier_admission: KvTierAdmission = "all",
    kv_tenant_share: KvTenantShare = 1.0,
    prefix_caching: PrefixCaching = True,
    kv_transport: Transport = "nixl",
    kv_tls: KvTls = "",
    kv_net_device: KvNetDevice = "",
    kv_verify: KvVerify = True,
    push: Push = "layer",
    kv_load_failure_policy: KvLoadFailure = "recompute",
    remote_headroom_blocks: RemoteHeadroom = 1,
    kv_lease_s: KvLease = 5.0,
    kv_silence_s: KvSilence = 10.0,
    max_num_seqs: MaxNumSeqs = 128,
    max_num_batched_tokens: MaxTokens = 2048,
    scheduling_policy: SchedulingPolicy = "priority",
    chunked_prefill: ChunkedPrefill = True,
    long_prefill_token_threshold: LongPrefill = None,
    max_num_partial_prefills: MaxPartialPrefills = 0,
    max_long_partial_prefills: MaxLongPartialPrefills = None,
    target_step_ms: TargetStep = 0.0,
    speculative: Speculative = "",
    logits_processors: LogitsProcessors = "",
    host: Host = "127.0.0.1",
    port: Port = 0,
    node_id: NodeName = "",
    stuck_after_s: StuckAfter = 60.0,
    drain_timeout_s: DrainTimeout = DRAIN_TIMEOUT_S,
    trace_step_ratio: TraceStepRatio = 0.0,
    operator_token_file: OperatorTokenFile = None,
    **given: Any,
) -> NodeOptions:
    """Options of prefill and decode nodes."""
    from baton.engine.runner.config import RunnerConfig
    from baton.engine.scheduler.config import (
        SchedulerConfig,
        parse_load_failure_policy,
        parse_scheduling_policy,
    )
    from baton.engine.spec_decode.config import parse_speculation
    from baton.kv_transfer.config import KvWorkerConfig, ReceiverConfig
    from baton.kv_transfer.tiers.file_admission import parse_admission_policy
    from baton.node.options import NodeOptions

    for_tls, for_telemetry, for_kv_events = split(
        given, tls_config, telemetry_options, kv_events_config
    )
    threshold = long_prefill_token_threshold
    if threshold is None:
        threshold = LONG_PREFILL_TOKEN_THRESHOLD if chunked_prefill else 0
    if max_long_partial_prefills is None:
        max_long_partial_prefills = 1 if threshold else 0
    return NodeOptions(
        runner=RunnerConfig(
            model=model,
            dtype=dtype,
            device=device,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_bytes=parse_kv_memory(kv_cache_memory),
            kv_cache_share=None,
            nodes_per_machine=nodes_per_machine,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_threads=threads,
            kernels=kernels,
            quantize=quantize,
            speculation=parse_speculation(speculative),
            logits_processors=tuple(filter(None, logits_processors.split(","))),
        ),
        scheduling=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=parse_scheduling_policy(scheduling_policy),
            enable_chunked_prefill=chunked_prefill,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=max_num_partial_prefills or None,
            target_step_s=target_step_ms / 1e3 if target_step_ms else None,
            max_long_partial_prefills=max_long_partial_prefills or None,
            kv_load_failure_policy=parse_load_failure_policy(kv_load_failure_policy),
            remote_headroom_blocks=remote_headroom_blocks,
        ),
        host=host,
        port=port,
        tls=tls_config(**for_tls),
        operator_tokens=operator_tokens(operator_token_file),
        node_id=node_id,
        stuck_after_s=stuck_after_s,
        drain_timeout_s=drain_timeout_s,
        model_name=served_model_name,
        kv_transport=kv_transport,
        kv_tls=kv_tls,
        kv_net_device=kv_net_device,
        kv_verify=kv_verify,
        kv_staging_bytes=parse_bytes(kv_staging_memory),
        kv_connector=kv_connector,
        kv_connector_config=parse_connector_config(kv_connector_config),
        kv_host_bytes=parse_bytes(kv_host_memory),
        kv_folder=kv_folder,
        kv_folder_bytes=parse_bytes(kv_folder_size),
        kv_object_store=kv_object_store,
        kv_object_store_bytes=parse_bytes(kv_object_store_size),
        kv_events=kv_events_config(**for_kv_events),
        kv_tier_admission=parse_admission_policy(kv_tier_admission),
        kv_tenant_share=kv_tenant_share,
        push=push,
        kv_worker=KvWorkerConfig(ReceiverConfig(lease_s=kv_lease_s, silence_s=kv_silence_s)),
        enable_prefix_caching=prefix_caching,
        cpus=parse_cpus(cpus),
        telemetry=telemetry_options(**for_telemetry),
        trace_step_ratio=trace_step_ratio,
    )


def node_command(role: str, run: Callable[[NodeOptions], None]) -> Callable[..., None]:
    @inherit_options(node_options)
    def command(
        parent_pid: ParentPid = 0,
        log_format: LogFormat = "auto",
        log_level: LogLevel = "info",
        **given: Any,
    ) -> None:
        options = node_options(**given)
        _begin(role, parent_pid, log_format, log_level)
        check_port(options.host, options.port)  # before torch is imported
        pin_to_cpus(options.cpus)
        run(options)
        _end_process()

    return command


def _run_prefill(options: NodeOptions) -> None:
    from baton.prefill_node.__main__ import main

    main(options)


def _run_decode(options: NodeOptions) -> None:
    from baton.decode_node.__main__ import main

    main(options)


serve.command(
    "prefill",
    help="Run a prefill node, which computes prompts and pushes their KV to decode nodes.",
)(node_command("prefill", _run_prefill))
serve.command(
    "decode",
    help="Run a decode node, which receives KV from prefill nodes and generates the answers.",
)(node_command("decode", _run_decode))


@inherit_options(tls_config, telemetry_options)
def router_options(
    decode_nodes: Nodes,
    prefill_nodes: Nodes = "",
    find_every_s: FindEvery = 5.0,
    node_patience_s: NodePatience = 5.0,
    drain_timeout_s: DrainTimeout = DRAIN_TIMEOUT_S,
    model: Model = "",
    host: Host = "127.0.0.1",
    port: Port = 50051,
    http_port: HttpPort = None,
    http_host: HttpHost = "",
    tool_parser: ToolParser = "",
    reasoning_parser: ReasoningParser = "",
    policy: Policy = "prefix_aware",
    local_prefill_below: LocalPrefill = 256,
    kv_pulls: KvPulls = True,
    max_in_flight: MaxInFlight = None,
    max_queue: MaxQueue = 1024,
    token_file: RouterTokenFile = None,
    operator_token_file: OperatorTokenFile = None,
    **given: Any,
) -> RouterOptions:
    from baton.router.__main__ import RouterOptions
    from baton.router.admission.admission_queue import AdmissionQueueConfig
    from baton.router.discovery.sources import parse_sources
    from baton.router.openai.response.output_parsers import Parsing
    from baton.router.routing.policy import Routing, parse_policy
    from baton.rpc.security.token import AcceptedTokens, read_tokens

    for_tls, for_telemetry = split(given, tls_config, telemetry_options)
    return RouterOptions(
        decode_nodes=parse_sources(decode_nodes),
        prefill_nodes=parse_sources(prefill_nodes),
        find_every_s=find_every_s,
        node_patience_s=node_patience_s,
        drain_timeout_s=drain_timeout_s,
        host=host,
        port=port,
        http_port=http_port,
        http_host=http_host,
        parsing=Parsing(tool_parser, reasoning_parser),
        model=model,
        routing=Routing(parse_policy(policy), local_prefill_below, kv_pulls=kv_pulls),
        admission_queue=AdmissionQueueConfig(max_in_flight, max_queue),
        tls=tls_config(**for_tls),
        tokens=None if token_file is None else AcceptedTokens(read_tokens(token_file)),
        operator_tokens=operator_tokens(operator_token_file),
        telemetry=telemetry_options(**for_telemetry),
    )


@serve.command()
@inherit_options(router_options)
def router(
    parent_pid: ParentPid = 0,
    log_format: LogFormat = "auto",
    log_level: LogLevel = "info",
    **given: Any,
) -> None:
    """Run the router, which clients connect to. Without --model it accepts only token ids."""
    from baton.router.__main__ import main

    options = router_options(**given)
    _begin("router", parent_pid, log_format, log_level)
    main(options)
    _end_process()


def _begin(role: str, parent_pid: int, log_format: str, log_level: str) -> None:
    exit_on_sigterm()
    if parent_pid:
        end_with_parent(parent_pid)
    configure_logging(role, log_format, log_level)
    raise_descriptor_limit()


def _end_process() -> NoReturn:
    """End the process with exit code 0, without the half second that unloading torch takes."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)
