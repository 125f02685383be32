"""Fixtures of a real language model, in this process and in a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.cluster import ClusterOptions, LocalCluster
from tests.support.real_models import smollm2

NODE_ARGUMENTS = ("--kv-cache-memory", "128MiB", "--threads", "1", "--max-num-seqs", "32")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Run torch with one thread, since the cluster's processes share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_file() -> Path:
    return smollm2()


@pytest.fixture(scope="package")
def cluster(model_file: Path) -> Iterator[LocalCluster]:
    """Run one prefill node and two decode nodes, in bfloat16 with the file's four bits."""
    options = ClusterOptions(
        str(model_file),
        1,
        2,
        False,
        node_arguments=(*NODE_ARGUMENTS, "--kv-host-memory", "64MiB"),
        router_arguments=("--http-port", "0"),
    )
    with LocalCluster(options) as running:
        yield running
    assert {child.process.returncode for child in running.children} == {0}
