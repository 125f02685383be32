"""Options of a node. The command line is parsed once, into `NodeOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from baton.core.errors import InvalidConfig
from baton.engine.engine_thread import HEARTBEAT_S
from baton.engine.runner.config import RunnerConfig
from baton.engine.scheduler.config import SchedulerConfig
from baton.kv_transfer.config import KvWorkerConfig
from baton.kv_transfer.tiers.file_admission import AdmissionPolicy
from baton.node.kv.events.config import KvEventsConfig
from baton.rpc.grace_period import DRAIN_TIMEOUT_S
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.security.token import AcceptedTokens
from baton.telemetry.options import TelemetryOptions

KV_TRANSPORTS = ("nixl", "ucxx")
KV_FOLDER_BYTES = 10 << 30
KV_OBJECT_STORE_BYTES = 1 << 40
PUSH_GRAINS = ("layer", "chunk")  # send each computed layer at once, or all at the chunk's end


@dataclass(frozen=True, slots=True)
class ChosenConnector:
    """KV connector that the options name."""

    name: str
    config: Mapping[str, object]
    option: str  # that names it


@dataclass(frozen=True, slots=True)
class NodeOptions:
    runner: RunnerConfig
    scheduling: SchedulerConfig = field(default_factory=SchedulerConfig)
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    tls: TlsConfig = PLAIN
    operator_tokens: AcceptedTokens | None = None  # for resets and drains; None: no operators
    node_id: str = ""  # empty: random
    model_name: str = ""  # empty: see `served_name`
    kv_transport: str = "nixl"
    kv_tls: str = ""  # UCX_TLS, such as "tcp"; empty: UCX chooses
    kv_net_device: str = ""  # such as "lo" or "eth0"; empty: see `kv_device`
    kv_verify: bool = True  # compare digests of sent and received KV
    kv_staging_bytes: int = 0  # memory for blocks that are converted; 0: they are refused
    kv_connector: str = ""  # name of the KV cache outside the engine; empty: none, or the tiers
    kv_connector_config: Mapping[str, object] = field(default_factory=dict)
    kv_host_bytes: int = 0  # host memory for KV that the KV cache has no room for
    kv_folder: str = ""  # for KV in files; empty: none
    kv_folder_bytes: int = KV_FOLDER_BYTES
    kv_object_store: str = ""  # s3://bucket/prefix, for KV in objects; empty: none
    kv_object_store_bytes: int = KV_OBJECT_STORE_BYTES
    kv_events: KvEventsConfig | None = None  # None: they are not published
    kv_tier_admission: AdmissionPolicy = AdmissionPolicy.ALL  # to files and objects
    kv_tenant_share: float = 1.0  # of each tier below the KV cache
    push: str = "layer"  # unit that a prefill node sends once it is computed; see PUSH_GRAINS
    kv_worker: KvWorkerConfig = field(default_factory=KvWorkerConfig)  # leases and timeouts
    # The engine's heart beats with each step and each layer, so a step can take longer than this.
    stuck_after_s: float = 60.0
    drain_timeout_s: float = DRAIN_TIMEOUT_S  # from the stop signal to a forced exit
    enable_prefix_caching: bool = True
    cpus: tuple[int, ...] = ()  # CPU affinity; empty: any CPU
    telemetry: TelemetryOptions = TelemetryOptions()
    trace_step_ratio: float = 0.0  # share of engine steps that get a trace of their own

    def __post_init__(self) -> None:
        if not self.stuck_after_s > HEARTBEAT_S:
            raise InvalidConfig(
                f"--stuck-after-s {self.stuck_after_s}: it must be above {HEARTBEAT_S}, "
                "which is how often an idle engine's heart beats"
            )
        if not 0 <= self.trace_step_ratio <= 1:
            raise InvalidConfig(
                f"--trace-step-ratio is {self.trace_step_ratio}; choose one from 0 to 1"
            )
        backing = {"--kv-folder": self.kv_folder, "--kv-object-store": self.kv_object_store}
        for option, value in backing.items():
            if value and not self.kv_host_bytes:
                raise InvalidConfig(
                    f"{option} needs --kv-host-memory, such as 1GiB: blocks wait there to be stored"
                )
        if self.kv_connector and self.kv_host_bytes:
            raise InvalidConfig(
                "--kv-host-memory is the KV connector `tiers`; leave out it or --kv-connector"
            )
        if self.kv_connector_config and not self.kv_connector:
            raise InvalidConfig("--kv-connector-config needs --kv-connector")
        self._check_prefix_caching()
        self._check_device()
        if not 0 < self.kv_tenant_share <= 1:
            raise InvalidConfig(
                f"--kv-tenant-share is {self.kv_tenant_share}; it must be above 0 and at most 1"
            )
        if self.kv_transport not in KV_TRANSPORTS:
            known = ", ".join(KV_TRANSPORTS)
            raise InvalidConfig(
                f"no KV transport is called {self.kv_transport!r}; choose one of: {known}"
            )
        if self.push not in PUSH_GRAINS:
            raise InvalidConfig(f"--push {self.push!r}: choose one of {', '.join(PUSH_GRAINS)}")

    def _check_prefix_caching(self) -> None:
        if self.enable_prefix_caching:
            return
        connector = self.chosen_connector
        needing = ["--kv-events-endpoint"] if self.kv_events is not None else []
        for option in [*needing, *([] if connector is None else [connector.option])]:
            raise InvalidConfig(f"{option} cannot be used with --no-prefix-caching")

    def _check_device(self) -> None:
        """On a GPU, some options have no code yet."""
        if self.runner.device == "cpu":
            return
        if self.kv_host_bytes:
            raise InvalidConfig("--kv-host-memory: blocks are copied on the CPU only")
        if self.kv_staging_bytes:
            raise InvalidConfig("--kv-staging-memory: blocks are converted on the CPU only")

    @property
    def pushes_layers(self) -> bool:
        return self.push == "layer"

    @property
    def chosen_connector(self) -> ChosenConnector | None:
        if self.kv_connector:
            return ChosenConnector(self.kv_connector, self.kv_connector_config, "--kv-connector")
        if not self.kv_host_bytes:
            return None
        config = {
            "host_bytes": self.kv_host_bytes,
            "folder": self.kv_folder,
            "folder_bytes": self.kv_folder_bytes,
            "object_store": self.kv_object_store,
            "object_store_bytes": self.kv_object_store_bytes,
            "admission": self.kv_tier_admission.value,
            "tenant_share": self.kv_tenant_share,
        }
        return ChosenConnector("tiers", config, "--kv-host-memory")

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
