"""Cluster with mutual TLS on every channel and bearer tokens of clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from baton.client import BatonError, Client, Generation
from baton.cluster import ClusterFailed, ClusterOptions, LocalCluster, await_serving
from baton.core.sampling import SamplingParams
from baton.rpc.channel import open_blocking_channel
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.v1 import kv_link_pb2, node_pb2
from tests.support.baton_command import run_baton
from tests.support.certificates import Authority, make_authority
from tests.support.models import prompt_of, reference_choices

TOKEN, OTHER_TOKEN, OPERATOR_TOKEN = "open-sesame", "sesame-open", "sesame-empty"
# Common to all processes, which dial addresses, as with nodes found by DNS.
NAME = "node.baton"
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Secured:
    cluster: LocalCluster
    authority: Authority
    process_tls: TlsConfig
    client_tls: TlsConfig  # by an authority that the router alone takes
    token_file: Path
    operator_token_file: Path

    @property
    def address(self) -> str:
        return self.cluster.address


@pytest.fixture(scope="module")
def secured(
    cluster_options: Callable[..., ClusterOptions], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("certificates")
    authority, of_clients = make_authority(folder), make_authority(folder, "clients")
    both = folder / "both.pem"
    both.write_bytes(authority.ca.read_bytes() + of_clients.ca.read_bytes())
    token_file = folder / "tokens"
    token_file.write_text(f"{TOKEN}\n{OTHER_TOKEN}\n", encoding="utf-8")
    operator_token_file = folder / "operators"
    operator_token_file.write_text(OPERATOR_TOKEN, encoding="utf-8")
    operators = f"--operator-token-file={operator_token_file}"
    process_tls = replace(authority.mutual("process", NAME), server_name=NAME)
    options = cluster_options(
        router_arguments=("--token-file", str(token_file), f"--tls-client-ca={both}", operators)
    )
    options = replace(
        options,
        node_arguments=(*options.node_arguments, f"--tls-client-ca={authority.ca}", operators),
        tls=replace(process_tls, client_ca=None),  # each process is configured separately
    )
    cert, key = of_clients.issue("client", "client.example")
    with LocalCluster(options) as cluster:
        client_tls = TlsConfig(cert, key, authority.ca, server_name=NAME)
        yield Secured(cluster, authority, process_tls, client_tls, token_file, operator_token_file)
    codes = {child.name: child.process.returncode for child in cluster.children}
    assert set(codes.values()) == {0}, codes


def test_kv_is_handed_over_between_nodes_with_mutual_tls(
    secured: Secured, model_folder: Path
) -> None:
    prompt = prompt_of(40, seed=60)

    with Client(secured.address, tls=secured.client_tls, token=TOKEN, timeout_s=60) as client:
        answer = client.generate(prompt, Generation(SAMPLING))

    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, 12)
    assert answer.finish is not None
    assert answer.finish.served.is_prefill_remote
    assert answer.finish.served.kv_bytes > 0
    assert answer.finish.served.prompt_tokens_computed_on_decode == 0


def test_a_salt_is_bound_to_the_token_of_its_client(secured: Secured) -> None:
    """The first of two equal requests computes the prompt, the second may hit its blocks."""
    prompt = prompt_of(64, seed=61)

    def num_cached(token: str, salt: str) -> int:
        with Client(secured.address, tls=secured.client_tls, token=token, timeout_s=60) as client:
            answer = client.generate(prompt, Generation(SAMPLING, cache_salt=salt))
        assert answer.finish is not None
        return answer.finish.served.prompt_tokens_cached_on_decode

    assert num_cached(TOKEN, "house") == 0
    assert num_cached(OTHER_TOKEN, "house") == 0
    assert num_cached(TOKEN, "house") > 0
    assert num_cached(TOKEN, "") == 0
    assert num_cached(OTHER_TOKEN, "") > 0  # requests without a salt share their KV


def test_every_process_refuses_connections_without_a_certificate(secured: Secured) -> None:
    for child in secured.cluster.children:
        for tls in (PLAIN, TlsConfig(ca=secured.authority.ca, server_name=NAME)):
            with pytest.raises(ClusterFailed, match="--tls-"):
                await_serving(child.address, 60, tls)
        await_serving(child.address, 60, secured.process_tls)


def test_nodes_refuse_client_certificates_that_the_router_accepts(secured: Secured) -> None:
    cluster, tls = secured.cluster, secured.client_tls
    await_serving(cluster.address, 60, tls)
    for child in (*cluster.prefills, *cluster.decodes):
        with pytest.raises(ClusterFailed, match="certificate"):
            await_serving(child.address, 60, tls)


@pytest.mark.parametrize("service", [kv_link_pb2, node_pb2], ids=["link", "node"])
def test_every_call_of_a_node_requires_a_certificate_of_its_authority(
    secured: Secured, service: ModuleType
) -> None:
    methods = [
        f"/{one.full_name}/{method.name}"
        for one in service.DESCRIPTOR.services_by_name.values()
        for method in one.methods
    ]
    nodes = (*secured.cluster.prefills, *secured.cluster.decodes)
    for child, tls in itertools.product(nodes, (PLAIN, secured.client_tls)):
        with open_blocking_channel(child.address, tls) as channel:
            for method in methods:
                call_it: Any = channel.stream_stream(method)
                call = call_it(iter([b""]), timeout=60)
                with pytest.raises(grpc.RpcError):
                    next(call)
                assert call.code() is grpc.StatusCode.UNAVAILABLE, method


def test_a_certificate_does_not_replace_a_token(secured: Secured) -> None:
    with (
        Client(secured.address, tls=secured.client_tls, timeout_s=60) as client,
        pytest.raises(BatonError, match="no token was sent") as refusal,
    ):
        client.model()

    assert refusal.value.code is grpc.StatusCode.UNAUTHENTICATED


def test_the_command_line_accepts_the_same_files_and_names_a_missing_one_in_one_line(
    secured: Secured,
) -> None:
    tls = secured.client_tls
    plain = ["generate", "the quick", "--address", secured.address, "--max-tokens", "4"]
    files = [f"--tls-ca={tls.ca}", f"--tls-cert={tls.cert}", f"--tls-key={tls.key}"]
    name, token = f"--tls-server-name={NAME}", f"--token-file={secured.token_file}"

    refused = run_baton(*plain)
    misnamed = run_baton(*plain, *files, token)
    served = run_baton(*plain, *files, name, token)

    assert refused.returncode != 0
    assert refused.stderr.startswith(f"baton: error: {secured.address} closed the connection")
    assert "if it speaks TLS only, give --tls-ca" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert "is not for that host; dial it by a name" in misnamed.stderr
    assert (served.returncode, served.stderr) == (0, "")


def test_a_reset_requires_an_operator_token(secured: Secured) -> None:
    tls = secured.client_tls
    command = [
        *("reset-prefix-cache", "--address", secured.address, f"--tls-server-name={NAME}"),
        *(f"--tls-ca={tls.ca}", f"--tls-cert={tls.cert}", f"--tls-key={tls.key}"),
    ]
    client, operator = secured.token_file, secured.operator_token_file

    refused = run_baton(*command, f"--token-file={client}")
    done = run_baton(*command, f"--token-file={client}", f"--operator-token-file={operator}")

    assert refused.returncode != 0
    assert "this call is for operators; send a token of the server's --operator" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert (done.returncode, done.stderr, done.stdout.count("blocks dropped")) == (0, "", 2)
