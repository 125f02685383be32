"""Compose variants: TLS, and the UCXX transport for KV. Run them with `make containers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from baton.client import Answer, BatonError, Client, Generation, TlsConfig
from baton.client.retries import Retries
from baton.core.sampling import SamplingParams
from baton.rpc.security.tls import PLAIN
from tests.containers.compose import ContainerCluster, run

pytestmark = pytest.mark.containers

PATIENCE_S = 120.0
NUM_TOKENS = 24
REQUESTED = Generation(SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
PROMPT = "import os, sys\n" * 20


@contextmanager
def running(cluster: ContainerCluster) -> Iterator[ContainerCluster]:
    try:
        cluster.build()
        cluster.scale(prefill=1, decode=1)
        yield cluster
    finally:
        cluster.down()


def answer_of(cluster: ContainerCluster, tls: TlsConfig = PLAIN) -> Answer:
    once = Retries(max_attempts=1)
    with Client(cluster.address, timeout_s=PATIENCE_S, retries=once, tls=tls) as client:
        return client.generate(PROMPT, REQUESTED)


def check_handed_over(answer: Answer, transport: str) -> None:
    assert answer.finish is not None
    served = answer.finish.served
    assert answer.finish.num_completion_tokens == NUM_TOKENS
    assert served.is_prefill_remote
    assert served.prompt_tokens_computed_on_decode == 0
    assert served.kv_bytes > 0
    assert transport in served.kv_transport


def test_the_tls_overlay_serves_trusted_clients_and_refuses_plain_text(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    run("tools/make_certificates.sh", str(folder))
    run("chmod", "-R", "a+rX", str(folder))  # for the user of the containers
    files = ("docker-compose.yml", "deploy/compose.tls.yaml")
    environment = {"BATON_TLS_DIR": str(folder)}
    with running(ContainerCluster("baton-test-tls", files, environment)) as cluster:
        check_handed_over(answer_of(cluster, TlsConfig(ca=folder / "ca.crt")), "nixl")
        with pytest.raises(BatonError) as refusal:
            answer_of(cluster)

    assert refusal.value.code is grpc.StatusCode.UNAVAILABLE


def test_kv_is_transferred_over_ucxx_in_an_image_with_ucxx() -> None:
    environment = {
        "BATON_EXTRAS": "ucxx",
        "BATON_IMAGE": "baton:ucxx",
        "BATON_KV_TRANSPORT": "ucxx",
    }
    with running(ContainerCluster("baton-test-ucxx", environment=environment)) as cluster:
        check_handed_over(answer_of(cluster), "ucxx")
