"""Refusals of a cluster: a named error with advice, and no effect on the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from baton.client import BatonError, Client, Generation, Served
from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.fork_server import ForkServer
from baton.rpc.status import remote_error
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.support.health import health_of
from tests.support.models import prompt_of
from tests.support.waits import await_value

PATIENCE_S = 60
SHORT = Generation(SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(autouse=True)
def _all_nodes_survive(cluster: LocalCluster, client: Client) -> Iterator[None]:
    pids = [child.process.pid for child in cluster.children]
    yield
    assert client.generate((7, 8, 9), SHORT).token_ids
    assert [child.process.pid for child in cluster.children if child.process.poll() is None] == pids


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (sampling_pb2.SamplingParams(temperature=-1.0), "temperature"),
        (sampling_pb2.SamplingParams(temperature=float("nan")), "temperature"),
        (sampling_pb2.SamplingParams(top_p=0.0), "top_p"),
        (sampling_pb2.SamplingParams(top_p=1.5), "top_p"),
        (sampling_pb2.SamplingParams(top_k=-2), "top_k"),
        (sampling_pb2.SamplingParams(min_p=2.0), "min_p"),
        (sampling_pb2.SamplingParams(max_tokens=0), "max_tokens"),
        (sampling_pb2.SamplingParams(max_tokens=2, min_tokens=3), "min_tokens"),
        (sampling_pb2.SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (sampling_pb2.SamplingParams(logprobs=-1), "logprobs"),
        (sampling_pb2.SamplingParams(stop=["x"] * 65), "stop"),
        (sampling_pb2.SamplingParams(stop=["x" * 1025]), "stop"),
        (sampling_pb2.SamplingParams(stop_token_ids=[10**9]), "stop_token_ids"),
        (sampling_pb2.SamplingParams(banned_token_ids=[10**9]), "banned"),
        (sampling_pb2.SamplingParams(logit_bias={10**9: 1.0}), "logit_bias"),
        (
            sampling_pb2.SamplingParams(allowed_token_ids=sampling_pb2.TokenIds(ids=[])),
            "allowed_token_ids",
        ),
        (
            sampling_pb2.SamplingParams(allowed_token_ids=sampling_pb2.TokenIds(ids=[10**9])),
            "allowed_token_ids",
        ),
    ],
)
def test_an_invalid_sampling_value_is_refused_with_its_field_name(
    cluster: LocalCluster, sampling: sampling_pb2.SamplingParams, named: str
) -> None:
    request = inference_pb2.GenerateRequest(
        token_ids=sampling_pb2.TokenIds(ids=[5, 6]), sampling=sampling
    )
    with grpc.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            list(stub.Generate(request, timeout=60))

    error = remote_error(refusal.value)
    assert (error.code, error.reason) == (INVALID, "INVALID_REQUEST")
    assert named in error.message


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(client: Client) -> None:
    with pytest.raises(BatonError) as refusal:
        client.generate(prompt_of(600), SHORT)

    assert (refusal.value.code, refusal.value.reason) == (INVALID, "INVALID_REQUEST")
    assert "600" in refusal.value.message
    assert "512" in refusal.value.message


def test_a_text_that_is_far_too_long_is_refused_with_both_lengths(client: Client) -> None:
    with pytest.raises(BatonError) as refusal:
        client.generate("import os\n" * 700_000, SHORT)

    assert (refusal.value.code, refusal.value.reason) == (INVALID, "INVALID_REQUEST")
    assert "7000000 characters" in refusal.value.message
    assert "512 tokens" in refusal.value.message


@dataclass(frozen=True, slots=True)
class Lists:
    """Node lists of a router, empty at first."""

    prefills: Path
    decodes: Path

    def write(self, *, prefill: Child, decode: Child) -> None:
        self.prefills.write_text(f"{prefill.await_address(PATIENCE_S)}\n", encoding="utf-8")
        self.decodes.write_text(f"{decode.await_address(PATIENCE_S)}\n", encoding="utf-8")


@contextmanager
def a_child(name: str, arguments: list[str], options: ClusterOptions) -> Iterator[Child]:
    child = Child(name, arguments, options, ForkServer())
    try:
        yield child
    finally:
        code = child.stop()
    assert code == 0


def test_a_router_reports_what_is_missing_until_it_is_complete(
    cluster: LocalCluster, cluster_options: Callable[..., ClusterOptions], tmp_path: Path
) -> None:
    options, lists = cluster_options(), Lists(tmp_path / "prefills", tmp_path / "decodes")
    [prefill], [decode] = cluster.prefills, cluster.decodes
    with (
        a_child("odd", a_prefill_of_larger_blocks(options), options) as odd,
        a_child("router", a_router_without_tokenizer(lists), options) as router,
        health_of(router.await_address(PATIENCE_S)) as health,
        Client(router.address, timeout_s=PATIENCE_S) as client,
    ):
        assert next(health) == "NOT_SERVING"
        assert refusal_of(client)[:2] == (grpc.StatusCode.UNAVAILABLE, "NO_NODES")

        lists.write(prefill=odd, decode=decode)
        assert next(health) == "SERVING"
        code, reason, message = refusal_of(client)
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INCOMPATIBLE_NODES")
        assert "block_size 32 and 16" in message
        assert refusal_of(client, "text")[:2] == (INVALID, "UNSUPPORTED_INPUT")

        lists.write(prefill=prefill, decode=decode)
        assert until_served(client).is_prefill_remote


def a_prefill_of_larger_blocks(options: ClusterOptions) -> list[str]:
    where = ["--model", options.model, "--node-id", "odd"]
    return ["prefill", *where, *options.node_arguments, "--block-size=32"]


def a_router_without_tokenizer(lists: Lists) -> list[str]:
    nodes = [f"--prefill-nodes=file://{lists.prefills}", f"--decode-nodes=file://{lists.decodes}"]
    return ["router", *nodes, "--find-every-s=0.05", "--node-patience-s=0", "--port=0"]


def refusal_of(
    client: Client, prompt: str | tuple[int, ...] = (5, 6)
) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(BatonError) as refusal:
        client.generate(prompt, SHORT)
    return refusal.value.code, refusal.value.reason, refusal.value.message


def until_served(client: Client) -> Served:
    """Retry until the router has read the changed lists."""

    def served() -> Served | None:
        with suppress(BatonError):
            answer = client.generate((5, 6), SHORT)
            assert answer.finish is not None
            return answer.finish.served
        return None

    found = await_value(served)
    assert found is not None
    return found
