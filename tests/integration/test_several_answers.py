"""Requests with n answers: as n single requests, with the prompt computed and moved once."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from baton.client import Answer, BatonError, Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from tests.support.baton_command import run_baton
from tests.support.models import prompt_of
from tests.support.nodes import await_load, is_busy, kill_the_writer
from tests.support.suspended_processes import suspended

BLOCK_SIZE = 16
PROMPT = prompt_of(70, seed=41)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=100, ignore_eos=True)

MakeOptions = Callable[..., ClusterOptions]


@pytest.fixture(scope="module")
def cluster(half_cluster: LocalCluster) -> LocalCluster:
    return half_cluster


def alone(client: Client, sampling: SamplingParams, count: int) -> list[list[int]]:
    """Return the answers of single requests with the seeds of each, without shared prefixes."""
    seeds = [(sampling.seed or 0) + index for index in range(count)]
    return [
        client.generate(
            PROMPT, Generation(replace(sampling, seed=seed), cache_salt=f"alone {seed}")
        ).token_ids
        for seed in seeds
    ]


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def test_each_answer_has_the_tokens_of_its_seed_and_the_prompt_is_transferred_once(
    cluster: LocalCluster, client: Client
) -> None:
    answers = client.generate_all(PROMPT, Generation(SEEDED, n=4, cache_salt="several"))

    assert tokens(answers) == alone(client, SEEDED, 4)
    assert len({tuple(each) for each in tokens(answers)}) == 4
    finishes = [answer.finish for answer in answers]
    served = [finish.served for finish in finishes if finish is not None]
    assert len(served) == 4
    assert {finish.num_prompt_tokens for finish in finishes if finish is not None} == {70}
    [first] = [one for one in served if one.is_prefill_remote]
    assert first.kv_blocks == 5
    for one in (one for one in served if one is not first):
        # Full blocks are shared; the last one is recomputed.
        assert one.prompt_tokens_cached_on_decode == 4 * BLOCK_SIZE
        assert one.prompt_tokens_computed_on_decode == 70 - 4 * BLOCK_SIZE
        assert one.kv_bytes == 0


def test_answers_of_one_token_are_correct(client: Client) -> None:
    one_token = replace(SEEDED, max_tokens=1)

    answers = client.generate_all(PROMPT, Generation(one_token, n=3, cache_salt="short"))

    assert tokens(answers) == alone(client, one_token, 3)


def test_every_answer_has_prompt_logprobs_if_requested(client: Client) -> None:
    asking = replace(SEEDED, prompt_logprobs=0, max_tokens=3)

    answers = client.generate_all(PROMPT, Generation(asking, n=2, cache_salt="told"))

    assert [len(answer.prompt_logprobs) for answer in answers] == [70, 70]


def test_closing_the_stream_ends_all_answers(cluster: LocalCluster, client: Client) -> None:
    stream = client.stream(
        PROMPT, Generation(replace(SEEDED, max_tokens=400), n=5, cache_salt="left")
    )
    seen = set()
    for chunk in stream:
        seen.add(chunk.index)
        if len(seen) == 5:
            break
    stream.close()

    for child in (*cluster.prefills, *cluster.decodes):
        await_load(child.address, lambda load: not is_busy(load))


@pytest.mark.parametrize("n", [0, 129, 2**31])
def test_too_few_and_too_many_are_refused_by_name(n: int, client: Client) -> None:
    with pytest.raises(BatonError, match=f"n is {n}; it must be from 1 to 128"):
        list(client.stream(PROMPT, Generation(SEEDED, n=n)))


def test_generate_refuses_more_than_one_answer(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="generate_all"):
        client.generate(PROMPT, Generation(SEEDED, n=2))


def test_http_gives_the_same_answers_as_grpc(cluster: LocalCluster, client: Client) -> None:
    body = {
        "prompt": list(PROMPT),
        "n": 3,
        "seed": 100,
        "temperature": 0.9,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": "http",
    }
    request = urllib.request.Request(
        f"http://{cluster.router.http_address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        reported = json.load(response)

    assert [choice["token_ids"] for choice in reported["choices"]] == alone(client, SEEDED, 3)
    assert reported["usage"]["prompt_tokens"] == 70
    assert reported["usage"]["completion_tokens"] == 72


def test_the_command_shows_each_answer(cluster: LocalCluster, client: Client) -> None:
    command = ("generate", "the quick", "-n", "2", "--json", "--address", cluster.address)
    done = run_baton(*command, "--seed", "7", "--max-tokens", "5")

    answers = json.loads(done.stdout)["answers"]

    expected = [
        client.generate("the quick", Generation({"seed": seed, "max_tokens": 5})).token_ids
        for seed in (7, 8)
    ]
    assert [answer["token_ids"] for answer in answers] == expected


@pytest.fixture
def two_decodes(half_options: MakeOptions) -> Iterator[LocalCluster]:
    with LocalCluster(half_options(num_decode=2)) as running:
        yield running


def test_each_answer_continues_on_another_node_when_its_node_is_killed(
    two_decodes: LocalCluster, client: Client
) -> None:
    sampling = replace(SEEDED, max_tokens=430)  # still running when the nodes are suspended
    answers = [Answer() for _ in range(3)]
    with Client(two_decodes.address, timeout_s=60) as breaking:
        stream = breaking.stream(PROMPT, Generation(sampling, n=3))
        for chunk in stream:
            answers[chunk.index].take(chunk)
            if all(answer.token_ids for answer in answers):
                break
        with suspended(*two_decodes.decodes):
            kill_the_writer(two_decodes)
        for chunk in stream:
            answers[chunk.index].take(chunk)

    assert tokens(answers) == alone(client, sampling, 3)
