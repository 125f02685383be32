"""Options of a node. The command line is parsed once, into `NodeOptions`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from ipaddress import ip_address
from typing import Annotated, Protocol, runtime_checkable

from baton.core.errors import InvalidConfig
from baton.core.exclusions import Feature, check_exclusions
from baton.core.options import KV_CACHE, MACHINE, MODEL, NETWORK, TELEMETRY, Option, check_options
from baton.core.units import parse_bytes
from baton.engine.config import HEARTBEAT_S
from baton.engine.runner.config import RunnerConfig
from baton.engine.scheduler.config import SchedulerConfig
from baton.kv_transfer.config import KvWorkerConfig
from baton.node.adapters.config import AdapterConfig
from baton.node.cpus import parse_cpus
from baton.node.kv.events.config import KvEventsConfig
from baton.node.kv.foreign.config import KvSourcesConfig
from baton.node.kv.tiers_config import TiersConfig
from baton.rpc.listening import ListenHost, ListenPort
from baton.rpc.process_end import DRAIN_TIMEOUT_S, DrainTimeout
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.security.token import OperatorTokens
from baton.telemetry.options import TelemetryOptions

GPU_STAGING_BYTES = 1 << 30


def _parse_connector_config(written: str) -> dict[str, object]:
    """Parse a JSON object; empty for an empty text. Raises InvalidConfig."""
    try:
        config = json.loads(written or "{}")
    except ValueError as error:
        raise InvalidConfig(f"kv-connector-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidConfig(f"kv-connector-config {written}: it must be a JSON object")
    return config


@dataclass(frozen=True, slots=True)
class ChosenConnector:
    """KV connector that the options name."""

    name: str
    config: Mapping[str, object]


@runtime_checkable
class PartConfig(Protocol):
    """Settings of an optional part of a node, which needs the prefix cache."""

    option: str  # that turns it on

    @property
    def is_on(self) -> bool: ...

    def check_shared(self) -> None:
        """Raise InvalidConfig for settings that several nodes cannot share."""
        ...


@dataclass(frozen=True, slots=True)
class NodeOptions:
    runner: RunnerConfig
    model_name: Annotated[  # empty: see `served_name`
        str,
        Option(
            "Name that clients use for the model. Default: the last name of the folder's path, or "
            "the name on the hub.",
            MODEL,
            name="served_model_name",
        ),
    ] = ""
    cpus: Annotated[  # CPU affinity; empty: any CPU
        tuple[int, ...],
        Option(
            "CPU cores to pin the process to, such as 0-3,6.",
            MACHINE,
            default="",
            parse=parse_cpus,
        ),
    ] = ()
    kv_staging_bytes: Annotated[
        int,
        Option(
            "Memory in which a decode node takes the KV of prefill nodes with another block- "
            "size, with or without a draft head unlike it, or with --kv-cache-dtype auto where "
            "it has int8 or fp8, to convert it; 0: such nodes are refused. A node on a GPU "
            "takes all KV there that cannot be written to the GPU, and has 1 GiB by default.",
            KV_CACHE,
            name="kv_staging_memory",
            default="0",
            parse=parse_bytes,
            is_setting=True,
        ),
    ] = 0
    tiers: TiersConfig = field(default_factory=TiersConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    kv_connector: Annotated[  # name of the KV cache outside the engine; empty: none, or the tiers
        str,
        Option(
            "Installed KV connector: a KV cache outside the node, from which prompts with the "
            "same prefix are loaded. Default: the built-in tiers with --kv-host-memory.",
            KV_CACHE,
        ),
    ] = ""
    kv_connector_config: Annotated[
        Mapping[str, object],
        Option(
            "Settings of --kv-connector, as a JSON object.",
            KV_CACHE,
            default="",
            parse=_parse_connector_config,
            is_setting=True,
        ),
    ] = field(default_factory=dict)
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "Reuse the cached KV of earlier requests with the same prefix.",
            KV_CACHE,
            name="prefix_caching",
            is_setting=True,
        ),
    ] = True
    kv_sources: KvSourcesConfig = KvSourcesConfig()
    kv_transport: Annotated[
        str, Option("KV transport: nixl or ucxx.", KV_CACHE, choices=("nixl", "ucxx"))
    ] = "nixl"
    kv_tls: Annotated[
        str,
        Option("UCX_TLS of the KV transport, such as tcp or ^cma. Default: UCX chooses.", KV_CACHE),
    ] = ""
    kv_net_device: Annotated[  # empty: see `kv_device`
        str,
        Option(
            "Network device for UCX, such as lo or eth0. Default: lo if --host is a loopback "
            "address, otherwise UCX chooses.",
            KV_CACHE,
        ),
    ] = ""
    scheduling: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_worker: KvWorkerConfig = field(default_factory=KvWorkerConfig)
    host: ListenHost = "127.0.0.1"
    port: ListenPort = 0
    node_id: Annotated[str, Option("Name of the node. Default: a random name.", NETWORK)] = ""
    # The engine's heart beats with each step and each layer, so a step can take longer than this.
    # It also beats while the engine is idle.
    stuck_after_s: Annotated[
        float,
        Option(
            "Seconds without a finished step or layer after which the node is not ready.",
            NETWORK,
            above=HEARTBEAT_S,
            is_setting=True,
        ),
    ] = 60.0
    drain_timeout_s: DrainTimeout = DRAIN_TIMEOUT_S
    trace_step_ratio: Annotated[
        float,
        Option(
            "Share of engine steps to trace, from 0 to 1. Each is a trace of its own, linked to "
            "those of the requests in the step.",
            TELEMETRY,
            at_least=0,
            at_most=1,
        ),
    ] = 0.0
    operator_tokens: OperatorTokens = None  # for resets and drains; None: no operators
    tls: TlsConfig = PLAIN
    telemetry: TelemetryOptions = TelemetryOptions()
    kv_events: KvEventsConfig = KvEventsConfig()

    def __post_init__(self) -> None:
        check_options(self)
        check_exclusions(
            {
                Feature.NO_HOST_MEMORY_TIER: not self.has_host_memory,
                Feature.BACKING_TIER: self.tiers.places,
            }
        )
        connector, host_bytes = self.kv_connector, self.tiers.host_bytes
        if connector and host_bytes:
            raise InvalidConfig(
                "--kv-host-memory is the KV connector `tiers`; leave out it or --kv-connector"
            )
        if self.kv_connector_config and not connector:
            raise InvalidConfig("kv-connector-config needs --kv-connector")
        caching = {"--kv-connector": bool(connector), "--kv-host-memory": bool(host_bytes)}
        for option, is_used in (caching | {each.option: True for each in self.parts}).items():
            if is_used and not self.enable_prefix_caching:
                raise InvalidConfig(f"{option} cannot be used with prefix-caching = false")

    @property
    def parts(self) -> tuple[PartConfig, ...]:
        """Return the settings of the optional parts that the node has."""
        values = [getattr(self, each.name) for each in fields(self)]
        return tuple(each for each in values if isinstance(each, PartConfig) and each.is_on)

    @property
    def runner_config(self) -> RunnerConfig:
        adapters = self.adapters
        if not adapters.are_served:
            return self.runner
        return replace(
            self.runner,
            max_loras=adapters.max_loras,
            max_lora_rank=adapters.max_lora_rank,
            max_cpu_loras=adapters.num_places,
        )

    @property
    def chosen_connector(self) -> ChosenConnector | None:
        if self.kv_connector:
            return ChosenConnector(self.kv_connector, self.kv_connector_config)
        if not self.has_host_memory:
            return None
        return ChosenConnector("tiers", asdict(self.tiers))

    @property
    def has_host_memory(self) -> bool:
        """Return whether KV is kept in host memory. A GPU's is pinned at the start: by choice."""
        if self.tiers.host_bytes is not None:
            return self.tiers.host_bytes > 0
        is_cpu = self.runner.device == "cpu"
        return is_cpu and self.enable_prefix_caching and not self.kv_connector

    @property
    def staging_bytes(self) -> int:
        """Size of the staging area. A node on a GPU needs one for peers that cannot write to it."""
        return self.kv_staging_bytes or (GPU_STAGING_BYTES * (self.runner.device != "cpu"))

    @property
    def kv_device(self) -> str:
        """Network device on which UCX listens; empty: all devices.

        If the node listens on a loopback address, all peers are on this machine and UCX listens on
        the loopback device alone.
        """
        return self.kv_net_device or ("lo" if _is_loopback(self.host) else "")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
