"""Fixture of a cluster that hostile and honest clients share, until these tests have ended."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from baton.client import Client
from baton.cluster import ClusterOptions, LocalCluster
from tests.support.honest_client import HONEST_REQUEST
from tests.support.models import VARIANTS, make_model_folder


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = make_model_folder(tmp_path_factory.mktemp("models") / "tiny", VARIANTS["llama"])
    arguments = ("--kv-cache-memory", "4MiB", "--threads", "1", "--kv-silence-s", "2")
    with LocalCluster(ClusterOptions(str(folder), node_arguments=arguments)) as running:
        yield running


@pytest.fixture(scope="package")
def right_answer(cluster: LocalCluster) -> tuple[int, ...]:
    with Client(cluster.address, timeout_s=60) as client:
        return tuple(client.generate(HONEST_REQUEST.prompt, HONEST_REQUEST.generation).token_ids)


@pytest.fixture
def channel_of(cluster: LocalCluster) -> Iterator[dict[str, grpc.Channel]]:
    addresses = {
        "router": cluster.address,
        "prefill": cluster.prefills[0].address,
        "decode": cluster.decodes[0].address,
    }
    channels = {name: grpc.insecure_channel(address) for name, address in addresses.items()}
    yield channels
    for channel in channels.values():
        channel.close()
