"""Settings of the cluster under test, and the options of its processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.cluster import ClusterOptions, FurtherModel
from benchmarks.chaos.adapter_folders import NAMES, make_adapters
from benchmarks.chaos.faults import TargetRole
from benchmarks.chaos.hostile.bad_adapters import write_bad_adapters
from benchmarks.chaos.hostile.client import REPLAY_SUFFIX
from benchmarks.chaos.sending import EMBEDDER
from benchmarks.chaos.tier_storage import TierStorage
from benchmarks.chaos.vllm_servers import VllmServers

ANY_PORT = ("--metrics-port", "0")
TENANT_SHARE = 0.25
UNTRACED = ("--trace-dir", "off")
OPERATOR_TOKEN = "operator"
NODE_MODULE = "benchmarks.chaos.node"
ADAPTERS = "adapters"
POOLING = "mean"  # so that the chat model embeds, too


@dataclass(frozen=True, slots=True)
class ChaosClusterConfig:
    """Settings of the cluster."""

    model: str
    num_prefill: int = 2
    num_decode: int = 2
    num_embed: int = 2
    num_encode: int = 0  # nodes that encode pictures
    num_vllm: int = 0  # vLLM servers, which compute prompts if there are no prefill nodes
    lease_s: float = 2.0
    silence_s: float = 3.0
    node_arguments: tuple[str, ...] = ()
    router_arguments: tuple[str, ...] = ()
    log_dir: Path | None = None
    clocks_jump: bool = False  # build and preload the clock library
    has_hostile_client: bool = False
    kv_host_memory: str = ""  # of each node; with it, they share files and objects, too
    kv_folder_size: str = "16MiB"
    prefill_has_tiers: bool = True  # without, second turns are loaded by decode nodes
    block_size: int = 16
    disk_slows: bool = False  # build and preload the library of the slow disk
    num_ranks: tuple[int, int] = (1, 1)  # of each prefill and decode node

    @property
    def num_by_role(self) -> dict[TargetRole, int]:
        return {
            TargetRole.ROUTER: 1,
            TargetRole.PREFILL: self.num_prefill,
            TargetRole.DECODE: self.num_decode,
            TargetRole.EMBED: self.num_embed,
            TargetRole.ENCODE: self.num_encode,
            TargetRole.VLLM: self.num_vllm,
        }


def cluster_options(
    setting: ChaosClusterConfig,
    folder: Path,
    environment: Mapping[str, str],
    tier_storage: TierStorage | None,
    vllm_servers: VllmServers,
) -> ClusterOptions:
    """Return the options of the processes; `folder` has the embedder and what nodes share."""
    tiers = () if tier_storage is None else tuple(_tier_arguments(setting, tier_storage))
    more = {} if tier_storage is None else tier_storage.environment
    operators = _operator_arguments(folder)
    times = (f"--kv-lease-s={setting.lease_s}", f"--kv-silence-s={setting.silence_s}")
    every_node = (*times, *ANY_PORT, *UNTRACED, *operators)
    http = ("--http-port", "0")
    ranks = [(f"--tensor-parallel-size={size}",) if size > 1 else () for size in setting.num_ranks]
    options = ClusterOptions(
        model=setting.model,
        num_prefill=setting.num_prefill,
        num_decode=setting.num_decode,
        num_encode=setting.num_encode,
        node_program=(NODE_MODULE, str(folder)),
        environment={**environment, **more},
        node_arguments=(
            *every_node,
            f"--pooling={POOLING}",
            f"--block-size={setting.block_size}",
            *_kv_event_arguments(setting, folder),
            *make_adapters(setting.model, folder / ADAPTERS),
            *setting.node_arguments,
        ),
        prefill_arguments=(*(tiers if setting.prefill_has_tiers else ()), *ranks[0]),
        decode_arguments=(*tiers, *ranks[1], *vllm_servers.node_arguments),
        embedders=(FurtherModel(str(folder / EMBEDDER), EMBEDDER),) * setting.num_embed,
        embedder_arguments=(*every_node, "--threads=1"),
        router_arguments=(
            *(*ANY_PORT, *UNTRACED, *http, *operators),
            *vllm_servers.router_arguments,
            *setting.router_arguments,
        ),
    )
    if setting.has_hostile_client:
        write_bad_adapters(folder / ADAPTERS / NAMES[0], folder / ADAPTERS)
    return options


def kv_events_of(folder: Path, node_id: str) -> str:
    """Return the endpoint where a node publishes KV events."""
    return f"ipc://{folder}/{node_id}-events"


def _tier_arguments(setting: ChaosClusterConfig, storage: TierStorage) -> Iterator[str]:
    yield f"--kv-host-memory={setting.kv_host_memory}"
    yield f"--kv-tenant-share={TENANT_SHARE}"
    yield from storage.arguments


def _operator_arguments(folder: Path) -> tuple[str, ...]:
    """Operators are needed to reset the tiers that nodes share."""
    path = folder / "operators"
    path.write_text(OPERATOR_TOKEN, encoding="utf-8")
    return ("--operator-token-file", str(path))


def _kv_event_arguments(setting: ChaosClusterConfig, folder: Path) -> tuple[str, ...]:
    """Nodes publish KV events if there is a hostile client, for it to attack."""
    if not setting.has_hostile_client:
        return ()
    endpoint = kv_events_of(folder, "{node_id}")
    replays = ("--kv-events-replay-endpoint", endpoint + REPLAY_SUFFIX)
    return ("--kv-events-endpoint", endpoint, *replays)
