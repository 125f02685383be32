"""SMG's gRPC service of the router, called with the stubs of smg-grpc-proto, over fake nodes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.core.errors import InvalidConfig
from baton.core.legs import GENERATING, LegKind
from baton.core.output import FinishReason
from baton.core.sampling import SamplingDefaults
from baton.core.structured_outputs import StructuredOutputs
from baton.router.doors.smg import service
from baton.rpc.node_info import NodeLoad
from baton.rpc.security.token import AcceptedTokens
from baton.rpc.security.token_gate import TokenInterceptor
from tests.support.node_calls import FakeNodeCalls, a_node, a_table

pytest.importorskip("smg_grpc_proto", reason="needs baton[smg]")
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from tests.support.smg import SmgRouter, a_request, an_smg_router

ROOT = Path(__file__).parents[2]
PROMPT = [3, 4, 5]
ANSWER = [12, 19, 26, 33]  # of fake nodes
PATIENCE_S = 30


def run(
    scenario: Callable[[SmgRouter], Awaitable[None]],
    nodes: FakeNodeCalls | None = None,
    **around: Any,
) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S), an_smg_router(nodes, **around) as router:
            await scenario(router)

    asyncio.run(within())


def test_answers_are_streamed_or_whole() -> None:
    async def scenario(router: SmgRouter) -> None:
        [whole] = await router.generate(PROMPT, max_tokens=4)
        complete = whole.complete
        assert (list(complete.output_ids), complete.finish_reason) == (ANSWER, "length")
        assert (complete.prompt_tokens, complete.completion_tokens) == (3, 4)

        *chunks, last = await router.generate(PROMPT, max_tokens=4, is_streamed=True)
        assert [token for each in chunks for token in each.chunk.token_ids] == ANSWER
        for each in chunks:
            assert each.chunk.completion_tokens == len(each.chunk.token_ids)
            assert each.chunk.prompt_tokens == 3
        assert (last.complete.finish_reason, last.complete.completion_tokens) == ("length", 4)

        several = await router.generate(PROMPT, max_tokens=4, n=2)
        assert [list(each.complete.output_ids) for each in several] == [ANSWER, ANSWER]
        assert sorted(each.complete.index for each in several) == [0, 1]

    run(scenario)


def test_a_matched_stop_token_is_reported() -> None:
    async def scenario(router: SmgRouter) -> None:
        [whole] = await router.generate(PROMPT, max_tokens=4)
        assert (whole.complete.finish_reason, whole.complete.matched_token_id) == ("stop", 33)

    run(scenario, FakeNodeCalls(ends_by=FinishReason.STOP, stop_token_id=33))


def test_prompt_logprobs_are_those_of_the_prompt() -> None:
    async def scenario(router: SmgRouter) -> None:
        first, *_ = await router.generate(PROMPT, max_tokens=4, prompt_logprobs=1, is_streamed=True)
        filled = first.chunk.input_logprobs
        assert list(filled.token_ids) == PROMPT
        assert [each.HasField("value") for each in filled.token_logprobs] == [False, True, True]
        assert [each.value for each in filled.token_logprobs][1:] == [-4.0, -5.0]

    run(scenario)


def test_omitted_parameters_have_the_defaults_of_the_gateway() -> None:
    defaults = SamplingDefaults(temperature=0.2, top_p=0.5)
    table = a_table(
        *(
            replace(node, card=replace(node.card, sampling_defaults=defaults))
            for node in map(a_node, GENERATING)
        )
    )

    async def scenario(router: SmgRouter) -> None:
        await router.generate(PROMPT)
        await router.generate(
            PROMPT,
            temperature=0,
            top_k=3,
            top_p=0.25,
            max_tokens=2,
            min_tokens=1,
            stop_token_ids=[7],
            logit_bias={5: -1.5},
            seed=-1,
            logprobs=0,
            json_schema='{"type": "object"}',
        )
        omitted, given = (call.request.sampling for call in router.nodes.received[::2])
        assert (omitted.temperature, omitted.top_p, omitted.top_k) == (1.0, 1.0, 0)
        assert omitted.max_tokens == 512 - len(PROMPT)
        assert (given.temperature, given.top_k, given.top_p) == (0.0, 3, 0.25)
        assert (given.max_tokens, given.min_tokens, given.stop_token_ids) == (2, 1, (7,))
        assert (given.logit_bias, given.seed, given.logprobs) == ({5: -1.5}, (1 << 64) - 1, 0)
        assert given.structured_outputs == StructuredOutputs(json='{"type": "object"}')

    run(scenario, table=table)


UNSUPPORTED = {
    "kv_transfer_params_json": {"kv_transfer_params_json": "{}"},
    "media_refs": {"media_refs": vllm_engine_pb2.MediaRefs()},
    "data_parallel_rank": {"data_parallel_rank": 0},
    "truncate_prompt_tokens": {"sampling_params": {"truncate_prompt_tokens": 4}},
    "logprobs": {"sampling_params": {"logprobs": -1}},
    "n is 129": {"sampling_params": {"n": 129}},
    "top_p": {"sampling_params": {"top_p": 1.5}},
    "regex": {"sampling_params": {"regex": ""}},
    "no prompt": {},
    "maximum context length": {"tokenized": {"input_ids": [1] * 513}},
    "max_tokens": {"sampling_params": {"max_tokens": 0}},
}


def test_what_is_not_supported_is_refused_by_name() -> None:
    async def scenario(router: SmgRouter) -> None:
        for name, fields in UNSUPPORTED.items():
            request = vllm_engine_pb2.GenerateRequest(**fields)
            if request.WhichOneof("input") is None and name != "no prompt":
                request.tokenized.input_ids.extend(PROMPT)
            with pytest.raises(grpc.RpcError, match=name) as refused:
                async for _ in router.stub.Generate(request):
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert not router.nodes.received
        with pytest.raises(grpc.RpcError, match="does not serve Embed: use"):
            await router.stub.Embed(vllm_engine_pb2.EmbedRequest())

    run(scenario)


def test_aborts_and_clients_that_go_away_end_the_request_on_nodes() -> None:
    async def scenario(router: SmgRouter) -> None:
        def begin() -> Any:
            return router.stub.Generate(a_request(PROMPT, n=2, max_tokens=4, is_streamed=True))

        call = begin()
        responses = aiter(call)
        await anext(responses)
        with pytest.raises(grpc.RpcError, match="'a' is under way"):
            await anext(aiter(begin()))
        [load] = (await router.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_waiting_reqs) == (2, 0)
        await router.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["unknown", "a"]))
        rest = [response async for response in responses]
        ends = [each.complete for each in rest if each.HasField("complete")]
        assert [end.finish_reason for end in ends] == ["abort", "abort"]
        assert len(router.nodes.left) == 2

        call = begin()
        await anext(aiter(call))
        call.cancel()
        await router.pipeline.drain()  # returns when no request is in flight
        assert len(router.nodes.left) == 4

    run(scenario, FakeNodeCalls(is_endless=True))


def test_the_gateway_learns_model_and_load() -> None:
    folder = ROOT / "models" / "demo"
    decode = a_node(LegKind.DECODE)
    decode = replace(decode, card=replace(decode.card, max_num_seqs=8, max_sequence_len=160))
    table = a_table(a_node(LegKind.PREFILL), decode)
    table.note_load(decode.address, NodeLoad(num_running=2, num_waiting=1, num_free_blocks=6))

    async def scenario(router: SmgRouter) -> None:
        stub = router.stub
        health = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        model = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        server = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        loads = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())
        assert health.healthy
        assert (model.served_model_name, model.tokenizer_path) == ("tiny", str(folder))
        assert (model.model_type, model.max_context_length, model.vocab_size) == ("llama", 160, 100)
        assert (server.max_num_seqs, server.kv_connector) == (8, "")
        [load] = loads.loads
        # What waits on nodes is in progress here; nothing is.
        assert (load.num_total_reqs, load.num_used_tokens) == (0, 64)
        assert load.token_usage == pytest.approx(0.4)

        chunks = [each async for each in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        archive = b"".join(chunk.data for chunk in chunks)
        assert hashlib.sha256(archive).hexdigest() == chunks[-1].sha256
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            assert {"tokenizer.json", "config.json"} <= set(files.namelist())
            assert files.read("config.json") == (folder / "config.json").read_bytes()

        table.lose(decode.address)
        with pytest.raises(grpc.RpcError, match="no decode node is reachable"):
            await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())

    run(scenario, table=table, model=str(folder))


def test_calls_need_a_token_where_baton_needs_one() -> None:
    async def scenario(router: SmgRouter) -> None:
        flush = common_pb2.FlushCacheRequest()
        with pytest.raises(grpc.RpcError, match="token") as refused:
            await router.generate(PROMPT, max_tokens=4)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match="token"):
            await router.stub.FlushCache(flush)

    run(scenario, interceptors=[TokenInterceptor(AcceptedTokens(("secret",)))])


def test_the_option_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "find_spec", lambda name: None)

    async def start() -> None:
        async with an_smg_router():
            pass

    with pytest.raises(InvalidConfig, match=r"pip install 'baton\[smg\]'"):
        asyncio.run(start())
