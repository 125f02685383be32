"""Requests through router, prefill node and decode node, over real gRPC and UCX."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import Answer, AsyncClient, BatonError, Client, Finish, Generation, Model
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from baton.rpc.node_info import NodeLoad
from tests.support.models import VOCAB_SIZE, prompt_of, reference_choices
from tests.support.nodes import await_load, card_at

BLOCK_SIZE = 16


def greedy(max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def finish_of(answer: Answer) -> Finish:
    assert answer.finish is not None
    return answer.finish


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100])
def test_tokens_equal_those_of_transformers_and_decode_computes_no_prompt(
    client: Client, cluster: LocalCluster, model_folder: Path, length: int
) -> None:
    prompt = prompt_of(length, seed=1)

    answer = client.generate(prompt, Generation(greedy()))

    served = finish_of(answer).served
    num_blocks = -(-length // BLOCK_SIZE)
    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, 24)
    assert served.is_prefill_remote
    assert served.prompt_tokens_computed_on_decode == 0
    assert served.kv_bytes == num_blocks * card_at(cluster.decodes[0].address).block_bytes
    assert served.kv_transport == "nixl"


def test_seeded_sampling_gives_the_tokens_of_a_local_engine(client: Client, local: LLM) -> None:
    prompt = prompt_of(45, seed=2)
    sampling = SamplingParams(max_tokens=32, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)

    answer = client.generate(prompt, Generation(sampling))

    assert answer.token_ids == local.generate(prompt, sampling)[0].token_ids


def test_every_token_has_logprobs_including_the_first(client: Client) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, ignore_eos=True)

    answer = client.generate(prompt_of(20, seed=3), Generation(sampling))

    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    assert all(len(one.top) == 2 and one.rank == 1 for one in answer.logprobs)


def test_a_repeated_prompt_transfers_only_blocks_missing_at_the_decode_node(client: Client) -> None:
    prompt = prompt_of(3 * BLOCK_SIZE + 5, seed=4)
    first = client.generate(prompt, Generation(greedy()))

    again = client.generate(prompt, Generation(greedy()))

    served = finish_of(again).served
    assert again.token_ids == first.token_ids
    assert finish_of(first).served.kv_blocks == 4
    assert served.kv_blocks == 1
    assert served.prompt_tokens_cached_on_decode == 3 * BLOCK_SIZE
    assert served.prompt_tokens_cached_on_prefill == 3 * BLOCK_SIZE
    assert finish_of(again).num_cached_prompt_tokens == 3 * BLOCK_SIZE
    assert finish_of(first).num_cached_prompt_tokens == 0
    assert served.prompt_tokens_computed_on_decode == 0


def test_an_answer_of_one_token_finishes(client: Client, model_folder: Path) -> None:
    prompt = prompt_of(30, seed=5)

    answer = client.generate(prompt, Generation(greedy(max_tokens=1)))

    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, 1)
    assert finish_of(answer).reason == "length"


def test_streamed_text_chunks_join_to_the_decoded_answer(client: Client, local: LLM) -> None:
    chunks = list(client.stream("the quick brown fox", Generation(greedy(max_tokens=40))))

    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert len([chunk for chunk in chunks if chunk.text]) > 1
    assert "".join(chunk.text for chunk in chunks) == local.tokenizer.decode(token_ids)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: Client) -> None:
    whole = client.generate("the lazy dog", Generation(greedy(max_tokens=40))).text
    stop = whole[len(whole) // 2 :][:3]

    answer = client.generate("the lazy dog", Generation(greedy(max_tokens=40), stop=(stop,)))

    assert answer.text == whole[: whole.index(stop)]
    assert finish_of(answer).stop_string == stop


def test_detokenize_inverts_tokenize(client: Client) -> None:
    text = "naïve café, 東京 🙂"

    assert client.detokenize(client.tokenize(text)) == text


def test_both_clients_return_the_same_tokens_and_model(
    client: Client, cluster: LocalCluster
) -> None:
    async def call_other_client() -> tuple[list[int], str, Model]:
        async with AsyncClient(cluster.address, timeout_s=60) as other:
            token_ids = await other.tokenize("the lazy dog")
            return token_ids, await other.detokenize(token_ids), await other.model()

    token_ids, text, model = asyncio.run(call_other_client())

    assert (token_ids, text) == (client.tokenize("the lazy dog"), "the lazy dog")
    assert model == client.model()
    assert (model.name, model.vocab_size) == ("tiny", VOCAB_SIZE)


def test_concurrent_prompts_get_their_own_answers(
    cluster: LocalCluster, model_folder: Path
) -> None:
    prompts = [prompt_of(10 + 3 * number, seed=6) for number in range(16)]

    async def generate_all() -> list[Answer]:
        async with AsyncClient(cluster.address, timeout_s=60) as client:
            requested = (client.generate(prompt, Generation(greedy())) for prompt in prompts)
            return list(await asyncio.gather(*requested))

    answers = asyncio.run(generate_all())

    for prompt, answer in zip(prompts, answers, strict=True):
        choices = reference_choices(model_folder, prompt, answer.token_ids, 24)
        assert answer.token_ids == choices
    assert all(finish_of(one).served.prompt_tokens_computed_on_decode == 0 for one in answers)


def test_cancelling_frees_every_block_on_both_nodes(client: Client, cluster: LocalCluster) -> None:
    stream = client.stream(prompt_of(40, seed=7), Generation(greedy(max_tokens=400)))
    next(stream)

    stream.close()

    for child in (*cluster.prefills, *cluster.decodes):
        num_blocks = card_at(child.address).num_blocks
        await_load(child.address, partial(is_all_free, num_blocks))


def test_an_expired_deadline_ends_the_request_on_every_node(cluster: LocalCluster) -> None:
    with (
        Client(cluster.address, timeout_s=0.2) as hasty,
        pytest.raises(BatonError) as failure,
    ):
        hasty.generate(prompt_of(40, seed=9), Generation(greedy(max_tokens=450)))

    assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    decode = cluster.decodes[0].address
    await_load(decode, partial(is_all_free, card_at(decode).num_blocks))


def test_the_command_line_prints_the_text_of_the_client(
    client: Client, cluster: LocalCluster
) -> None:
    text = client.generate("the quick brown", Generation(SamplingParams(8, temperature=0.0))).text
    options = ["--address", cluster.address, "--max-tokens", "8", "--temperature", "0"]

    printed = subprocess.run(
        [sys.executable, "-m", "baton", "generate", *options, "the quick brown"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert printed.stdout == text + "\n"


def test_max_tokens_beyond_the_context_are_lowered_with_a_warning(
    cluster: LocalCluster, client: Client
) -> None:
    prompt = "the quick brown"
    finish = client.generate(prompt, Generation(greedy(max_tokens=9999))).finish

    printed = subprocess.run(
        [
            *(sys.executable, "-m", "baton", "generate", "--address", cluster.address),
            *("--max-tokens", "9999", "--temperature", "0", "--ignore-eos", prompt),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert finish is not None
    assert finish.num_prompt_tokens + finish.num_completion_tokens == 512
    [warning] = finish.warnings
    assert warning.startswith(f"max_tokens 9999 was lowered to {finish.num_completion_tokens}: ")
    assert printed.stderr == f"baton: warning: {warning}\n"


def is_all_free(num_blocks: int, load: NodeLoad) -> bool:
    return load.num_running == 0 and load.num_free_blocks == num_blocks


@pytest.mark.parametrize(
    ("prompt", "generation", "code", "reason"),
    [
        ((), Generation(), grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_PROMPT"),
        ("", Generation(), grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_PROMPT"),
        ((VOCAB_SIZE,), Generation(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ((5,) * 600, Generation(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
        ((5,), Generation(model="other"), grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    ],
)
def test_an_invalid_request_is_refused_by_name_and_the_next_one_is_served(
    client: Client,
    cluster: LocalCluster,
    prompt: tuple[int, ...] | str,
    generation: Generation,
    code: grpc.StatusCode,
    reason: str,
) -> None:
    pids = [child.process.pid for child in cluster.children]

    with pytest.raises(BatonError) as refusal:
        client.generate(prompt, generation)

    assert (refusal.value.code, refusal.value.reason) == (code, reason)
    assert client.generate((7, 8, 9), Generation(greedy(max_tokens=4))).token_ids
    assert [child.process.pid for child in cluster.children if child.process.poll() is None] == pids


def test_an_id_in_use_is_refused(client: Client) -> None:
    generation = Generation(greedy(max_tokens=400), request_id="twice")
    first = client.stream(prompt_of(12, seed=8), generation)
    next(first)

    with pytest.raises(BatonError) as refusal:
        client.generate((1, 2, 3), generation)

    first.close()
    assert refusal.value.reason == "REQUEST_ID_IN_USE"


def test_health_and_reflection_cover_every_process(cluster: LocalCluster) -> None:
    expected = {
        cluster.router: "baton.v1.InferenceService",
        cluster.prefills[0]: "baton.v1.LegService",
        cluster.decodes[0]: "baton.v1.LegService",
    }

    for child, service in expected.items():
        with grpc.insecure_channel(child.address) as channel:
            requested = health_pb2.HealthCheckRequest(service=service)
            health = health_pb2_grpc.HealthStub(channel).Check(requested)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            assert service in services_at(channel)


def services_at(channel: grpc.Channel) -> list[str]:
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    [response] = stub.ServerReflectionInfo(iter([listing]))
    return [service.name for service in response.list_services_response.service]
