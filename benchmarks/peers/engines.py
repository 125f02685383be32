"""Baton and vLLM servers, started for one measurement."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from baton.client import AsyncClient
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.errors import InvalidConfig
from baton.core.units import GIB
from baton.rpc.node_info import NodeAvailability
from benchmarks.peers.completions_api import CompletionsApi, EngineFailed
from benchmarks.peers.settings import GPU_SHARE, clean_environment, python_of, vllm_settings
from benchmarks.processes import external_process, free_port

START_TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.5
NUM_LOG_LINES = 20
MAX_NUM_SEQS = ("--max-num-seqs", "32")
# The KV cache holds the whole load, and no engine caches prefixes.
BATON = ("--kv-cache-memory", "2GiB", "--no-prefix-caching", "--trace-dir", "off", *MAX_NUM_SEQS)
PATCHES = Path(__file__).resolve().parent / "workers" / "quiet_vllm"
OVER_NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
VLLM_KV_GIB = 2
VLLM = ("--no-enable-prefix-caching", *MAX_NUM_SEQS)
VLLM_ON_CPU = ("--max-model-len", "4096")  # its KV cache must hold one request


def core_halves() -> tuple[Sequence[int], Sequence[int]]:
    """Return the cores for prefill and for decode. Raises InvalidConfig with a single core."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise InvalidConfig(
            "a prefill and a decode node need one core each; this process may use one only"
        )
    middle = len(cpus) // 2
    return cpus[:middle], cpus[middle:]


@contextmanager
def baton_disaggregated(
    model: str, device: str = "cpu", kernels: str = "auto"
) -> Iterator[CompletionsApi]:
    """Start a prefill node on one half of the cores, a decode node on the other.

    Nodes on a GPU share it.
    """
    prefill, decode = core_halves()
    computes = ("--device", device, "--kernels", kernels)
    options = replace(
        _options(model),
        prefill_arguments=(*_on_cores(prefill), *computes),
        decode_arguments=(*_on_cores(decode), *computes),
    )
    with LocalCluster(options) as cluster:
        yield CompletionsApi(f"http://{cluster.router.http_address}")


@contextmanager
def baton_colocated(
    model: str, cpus: Sequence[int] | None = None, step_ms: int | None = None
) -> Iterator[CompletionsApi]:
    """Start one node that prefills and decodes, on `cpus` or on all cores."""
    own = _on_cores(cpus or [*core_halves()[0], *core_halves()[1]])
    pace = () if step_ms is None else ("--target-step-ms", str(step_ms))
    options = replace(_options(model), num_prefill=0, decode_arguments=(*own, *pace))
    with LocalCluster(options) as cluster:
        yield CompletionsApi(f"http://{cluster.router.http_address}")


@contextmanager
def vllm_colocated(model: str, venv: Path, chunk: int | None) -> Iterator[CompletionsApi]:
    """Start one server on all cores. `chunk`: token budget of a step; None: vLLM's default."""
    more = () if chunk is None else ("--max-num-batched-tokens", str(chunk))
    more = (*VLLM_ON_CPU, *more)
    cpus = [*core_halves()[0], *core_halves()[1]]
    with (
        TemporaryDirectory(prefix="baton-vllm-") as logs,
        vllm_server(model, venv, cpus, Path(logs, "server"), more, {}) as server,
    ):
        yield server.wait_until_ready()


@contextmanager
def vllm_disaggregated(
    model: str, venv: Path, *, is_patched: bool, device: str = "cpu"
) -> Iterator[CompletionsApi]:
    """Start a prefill and a decode server, each on half of the cores, with KV over NIXL.

    Servers on a GPU share it.
    """
    is_on_cpu = device == "cpu"
    transfer = {**OVER_NIXL, "kv_buffer_device": "cpu" if is_on_cpu else "cuda"}
    memory = VLLM_ON_CPU if is_on_cpu else ("--gpu-memory-utilization", str(GPU_SHARE))
    more = (*memory, "--kv-transfer-config", json.dumps(transfer))
    patches = {"PYTHONPATH": str(PATCHES)} if is_patched else {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="baton-vllm-")))
        servers = []
        for name, cpus in zip(("prefill", "decode"), core_halves(), strict=True):
            settings = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **patches}
            server = vllm_server(model, venv, cpus, logs / name, more, settings)
            servers.append(stack.enter_context(server))
        # Both start at the same time.
        prefill, decode = [server.wait_until_ready() for server in servers]
        yield replace(decode, prefill_url=prefill.url, groups=prefill.groups + decode.groups)


@contextmanager
def vllm_prefill_baton_decode(model: str, venv: Path) -> Iterator[CompletionsApi]:
    """Start a vLLM server that computes prompts on half of the cores, and a Baton decode node.

    Baton's router asks the server. It yields once their check has passed.
    """
    prefill, decode = core_halves()
    more = (
        *VLLM_ON_CPU,
        "--kv-transfer-config",
        json.dumps(OVER_NIXL | {"kv_buffer_device": "cpu"}),
    )
    port = free_port()
    with ExitStack() as stack:
        log = Path(stack.enter_context(TemporaryDirectory(prefix="baton-vllm-")), "prefill")
        settings = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        server = stack.enter_context(vllm_server(model, venv, prefill, log, more, settings))
        server.wait_until_ready()
        source = f"vllm://localhost:{port}?packing={cpu_packing()}"
        # Reads end in the prefix cache, which is on.
        nodes = tuple(each for each in BATON if each != "--no-prefix-caching")
        options = replace(
            _options(model),
            num_prefill=0,
            node_arguments=nodes,
            decode_arguments=(*_on_cores(decode), "--kv-sources", source),
        )
        address = server.url.replace("http", "vllm")
        routed = (*options.router_arguments, "--prefill-nodes", address)
        cluster = stack.enter_context(LocalCluster(replace(options, router_arguments=routed)))
        asyncio.run(_await_check(cluster.address, address))
        yield CompletionsApi(f"http://{cluster.router.http_address}")


async def _await_check(router: str, server: str) -> None:
    """Wait until the router lets a vLLM server compute prompts. Raises EngineFailed."""
    reason = ""
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(START_TIMEOUT_S),
            AsyncClient(router) as client,
            aclosing(client.nodes(LOOK_EVERY_S)) as updates,
        ):
            async for nodes in updates:
                [seen] = [node for node in nodes if node.address == server]
                reason = seen.reason
                if seen.state is NodeAvailability.READY:
                    return
    raise EngineFailed(f"{server} is not used: {reason}")


def cpu_packing() -> str:
    """Return vLLM's packing of KV on this CPU, in bfloat16."""
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"


def vllm_server_bytes(model: str) -> int:
    """Estimate the memory of a vLLM server: KV, weights read and packed, processes."""
    weights = sum(shard.stat().st_size for shard in Path(model).glob("*.safetensors"))
    processes = 3 * GIB // 2
    return VLLM_KV_GIB * GIB + 2 * weights + processes


def _on_cores(cpus: Sequence[int]) -> tuple[str, ...]:
    return ("--cpus", ",".join(map(str, cpus)), "--threads", str(len(cpus)))


def _options(model: str) -> ClusterOptions:
    router = ("--http-port", "0", "--trace-dir", "off")
    return ClusterOptions(model, node_arguments=BATON, router_arguments=router)


@contextmanager
def vllm_server(
    model: str,
    venv: Path,
    cpus: Sequence[int],
    log: Path,
    more: Sequence[str],
    settings: dict[str, str],
) -> Iterator[VllmServer]:
    """Launch a server without waiting for it; it ends with the block."""
    port = free_port()
    serve = ("-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16")
    command = [
        str(python_of(venv)),
        *serve,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *VLLM,
        *more,
    ]
    environment = clean_environment() | vllm_settings(venv, cpus, kv_gib=VLLM_KV_GIB) | settings
    with (
        log.open("w") as output,
        external_process(
            ["taskset", "-c", ",".join(map(str, cpus)), *command],
            environment | {"VLLM_HOST_IP": "127.0.0.1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        yield VllmServer(f"http://127.0.0.1:{port}", process, log)


@dataclass(frozen=True, slots=True)
class VllmServer:
    url: str
    process: subprocess.Popen[str]
    log: Path

    def wait_until_ready(self) -> CompletionsApi:
        """Wait until it serves. Raises EngineFailed."""
        until_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until_s and self.process.poll() is None:
            with (
                suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply,
            ):
                if reply.status == 200:
                    return CompletionsApi(self.url, groups=(self.process.pid,))
            time.sleep(LOOK_EVERY_S)
        lines = self.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        raise EngineFailed("\n".join(["vLLM did not start; the end of its log:", *lines]))
