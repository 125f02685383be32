"""Fixtures of clusters of real processes, for tests that leave them intact.

They end with the last test of this folder: idle processes wake up a few times per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.client import Client
from baton.cluster import ClusterOptions, LocalCluster
from baton.llm import LLM
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder
from tests.support.scripted_agent import make_agent_folder

NODE_ARGUMENTS = (
    "--kv-cache-memory",
    "4MiB",
    "--threads",
    "1",
    "--max-num-seqs",
    "32",
    "--pooling",
    "mean",
)

# Services for gateways, where their package is installed.
SMG = ("--smg",) if find_spec("smg_grpc_proto") else ()
StartCluster = Callable[..., LocalCluster]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Run torch with one thread, since the cluster's processes share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny", VARIANTS["llama"])


@pytest.fixture(scope="session")
def half_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model for tests that compare Baton with itself.

    Native kernels compute it in a third of the time, with the same bits in any batch.
    """
    variant = VARIANTS["llama-bf16" if kernels_by_variant() else "llama"]
    return make_model_folder(tmp_path_factory.mktemp("models") / "half", variant)


@pytest.fixture(scope="session")
def half_options(
    cluster_options: Callable[..., ClusterOptions], half_folder: Path
) -> Callable[..., ClusterOptions]:
    def make(**settings: Any) -> ClusterOptions:
        return replace(cluster_options(**settings), model=str(half_folder))

    return make


@pytest.fixture(scope="package")
def half_cluster(half_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    """Run what `cluster` does, with the model of `half_folder`."""
    with LocalCluster(half_options(router_arguments=("--http-port", "0"))) as running:
        yield running


@pytest.fixture(scope="session")
def cluster_options(model_folder: Path) -> Callable[..., ClusterOptions]:
    def make(
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        router_arguments: tuple[str, ...] = (),
        is_colocated: bool = False,
    ) -> ClusterOptions:
        return ClusterOptions(
            str(model_folder),
            num_prefill,
            num_decode,
            is_colocated,
            node_arguments=NODE_ARGUMENTS,
            router_arguments=router_arguments,
        )

    return make


@pytest.fixture(scope="package")
def cluster(cluster_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    """Run one prefill node, one decode node and one router. Every process must exit with code 0."""
    options = cluster_options(router_arguments=("--http-port", "0", *SMG))
    with LocalCluster(options) as running:
        yield running
    codes = {child.name: child.process.returncode for child in running.children}
    assert set(codes.values()) == {0}, codes


@pytest.fixture(scope="package")
def colocated(cluster_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    """Run two colocated nodes and one router."""
    with LocalCluster(cluster_options(is_colocated=True)) as running:
        yield running


@pytest.fixture(scope="package")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Run a model that reasons, calls tools and reads their results by a script."""
    folder = make_agent_folder(tmp_path_factory.mktemp("models") / "agent")
    options = ClusterOptions(
        str(folder),
        node_arguments=("--kv-cache-memory", "32MiB", "--threads", "1"),
        router_arguments=("--http-port", "0"),
    )
    with LocalCluster(options) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address, timeout_s=60) as connected:
        yield connected


@pytest.fixture(scope="session")
def local(model_folder: Path) -> Iterator[LLM]:
    """Run the same model in this process, without servers and hand-offs."""
    with LLM(
        str(model_folder), kv_cache_memory="4MiB", num_threads=1, show_progress=False
    ) as engine:
        yield engine
