"""Prefill and decode node as a pair of an SMG gateway, called with the stubs of smg-grpc-proto."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from baton.rpc.channel import open_blocking_channel
from tests.support.models import prompt_of
from tests.support.nodes import await_all_free
from tests.support.ports import free_port

pytest.importorskip("smg_grpc_proto", reason="needs baton[smg]")
from smg_grpc_proto.generated import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

PATIENCE_S = 60


@dataclass(frozen=True)
class Pair:
    prefill: Any
    decode: Any
    prefill_port: int

    def request(
        self, prompt: list[int], *, is_streamed: bool = False, port: int = 0, **sampling: Any
    ) -> Any:
        """Return what the gateway sends to both nodes."""
        return sglang_scheduler_pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
            tokenized={"input_ids": prompt},
            stream=is_streamed,
            disaggregated_params={
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": port or self.prefill_port,
                "bootstrap_room": 7,  # also of requests before
            },
            sampling_params={"max_new_tokens": 6, "ignore_eos": True, **sampling},
        )


@pytest.fixture(scope="module")
def pair(cluster: LocalCluster) -> Iterator[Pair]:
    with ExitStack() as channels:
        prefill, decode = (
            sglang_scheduler_pb2_grpc.SglangSchedulerStub(
                channels.enter_context(open_blocking_channel(node.address))
            )
            for node in (cluster.prefills[0], cluster.decodes[0])
        )
        yield Pair(prefill, decode, int(cluster.prefills[0].address.rpartition(":")[2]))


def generate(stub: Any, request: Any) -> Any:
    return stub.Generate(request, timeout=PATIENCE_S)


def test_a_pair_answers_as_baton_does(pair: Pair, client: Client) -> None:
    prompt = list(prompt_of(50, seed=40))
    request = pair.request(prompt, n=2, is_streamed=True)
    decode = generate(pair.decode, request)
    assert decode.initial_metadata() is not None  # before the prompt is computed
    prefill = generate(pair.prefill, request)
    first = {each.complete.index: each for each in prefill if each.HasField("complete")}
    tokens: dict[int, list[int]] = {0: [], 1: []}
    ends = {}
    for response in decode:
        assert response.request_id == request.request_id
        if response.HasField("complete"):
            ends[response.complete.index] = response.complete
        else:
            tokens[response.chunk.index] += response.chunk.token_ids
            assert response.chunk.completion_tokens == len(tokens[response.chunk.index])

    wanted = client.generate(prompt, Generation(SamplingParams(6, temperature=0, ignore_eos=True)))
    assert tokens == {0: list(wanted.token_ids), 1: list(wanted.token_ids)}
    assert {end.finish_reason for end in ends.values()} == {"length"}
    assert {each.complete.completion_tokens for each in first.values()} == {1}
    # Both had the KV from the prefill node, but for what the first one left in the cache.
    assert ends[0].cached_tokens == 0


def test_a_decode_node_alone_computes_the_prompt(pair: Pair, client: Client) -> None:
    prompt = list(prompt_of(20, seed=41))
    request = pair.request(prompt)
    request.ClearField("disaggregated_params")
    [whole] = generate(pair.decode, request)
    wanted = client.generate(prompt, Generation(SamplingParams(6, temperature=0, ignore_eos=True)))
    assert list(whole.complete.output_ids) == list(wanted.token_ids)


def test_aborts_free_both_nodes(pair: Pair, cluster: LocalCluster) -> None:
    request = pair.request(list(prompt_of(40, seed=42)), max_new_tokens=200, is_streamed=True)
    decode = generate(pair.decode, request)
    decode.initial_metadata()
    # The first token does not wait for the decode node, which has no need of it any more.
    [*_, end] = generate(pair.prefill, pair.request(list(prompt_of(40, seed=43))))
    assert end.complete.finish_reason == "length"
    aborted = pair.prefill.Abort(sglang_scheduler_pb2.AbortRequest(request_id=end.request_id))
    assert aborted.success
    assert pair.decode.Abort(
        sglang_scheduler_pb2.AbortRequest(request_id=request.request_id)
    ).success
    assert [each.complete.finish_reason for each in decode] == ["abort"]
    again = pair.decode.Abort(sglang_scheduler_pb2.AbortRequest(request_id=request.request_id))
    assert not again.success
    for node in cluster.nodes:
        await_all_free(node.address)

    going_away = generate(pair.decode, pair.request(list(prompt_of(40, seed=44))))
    going_away.initial_metadata()
    going_away.cancel()
    for node in cluster.nodes:
        await_all_free(node.address)


def test_without_the_prefill_node_decode_computes_the_prompt(pair: Pair, client: Client) -> None:
    prompt = list(prompt_of(40, seed=45))
    [whole] = generate(pair.decode, pair.request(prompt, port=free_port()))
    wanted = client.generate(prompt, Generation(SamplingParams(6, temperature=0, ignore_eos=True)))
    assert list(whole.complete.output_ids) == list(wanted.token_ids)


def test_nodes_report_their_role_and_load(pair: Pair) -> None:
    for stub, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        health = stub.HealthCheck(sglang_scheduler_pb2.HealthCheckRequest())
        server = stub.GetServerInfo(sglang_scheduler_pb2.GetServerInfoRequest())
        [load] = stub.GetLoads(sglang_scheduler_pb2.GetLoadsRequest()).loads
        assert (health.healthy, server.server_args["disaggregation_mode"]) == (True, role)
        assert (load.disaggregation.mode, load.max_total_num_tokens > 0) == (role, True)
