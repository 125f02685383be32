"""The router as a worker of an SMG gateway, called with the stubs of smg-grpc-proto."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from baton.rpc.channel import open_blocking_channel
from tests.support.models import prompt_of
from tests.support.nodes import await_all_free

pytest.importorskip("smg_grpc_proto", reason="needs baton[smg]")
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from tests.support.smg import a_request

PATIENCE_S = 60
PROMPT = prompt_of(50, seed=40)


@pytest.fixture(scope="module")
def engine(cluster: LocalCluster) -> Iterator[Any]:
    with open_blocking_channel(cluster.router.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def test_answers_are_those_of_baton(engine: Any, client: Client) -> None:
    wanted = client.generate(PROMPT, Generation(SamplingParams(6, temperature=0, ignore_eos=True)))
    sampling: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    [whole] = engine.Generate(a_request(PROMPT, **sampling), timeout=PATIENCE_S)
    streamed = a_request(PROMPT, request_id="b", is_streamed=True, **sampling)
    *chunks, last = engine.Generate(streamed, timeout=PATIENCE_S)

    assert list(whole.complete.output_ids) == wanted.token_ids
    assert [token for each in chunks for token in each.chunk.token_ids] == wanted.token_ids
    assert (last.complete.finish_reason, last.complete.completion_tokens) == ("length", 6)


def test_an_abort_frees_both_nodes(engine: Any, cluster: LocalCluster) -> None:
    request = a_request(PROMPT, is_streamed=True, max_tokens=200, ignore_eos=True)
    answer = engine.Generate(request, timeout=PATIENCE_S)
    next(answer)
    engine.Abort(vllm_engine_pb2.AbortRequest(request_ids=[request.request_id]))

    *_, last = answer
    assert last.complete.finish_reason == "abort"
    for node in cluster.nodes:
        await_all_free(node.address)
