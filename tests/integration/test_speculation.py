"""Speculative decoding on a real cluster: the same answers as without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncClient, Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.legs import LegKind
from baton.core.sampling import ReasoningSection, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.llm import LLM
from baton.rpc.node_info import NodeStatus
from tests.support.client_load import ClientRequest, answer_all
from tests.support.draft_heads import make_eagle_folder, make_head_folder
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.nodes import await_load, is_busy, kill_the_writer
from tests.support.scrapes import Scrape
from tests.support.suspended_processes import suspended

MakeOptions = Callable[..., ClusterOptions]
METHODS = ("ngram", "eagle3", "draft")
SPECULATED = "baton_tokens_speculated_total"

# Few allowed tokens, so that some drafts are accepted and others are not.
SEEDED = SamplingParams(
    max_tokens=60,
    temperature=0.7,
    allowed_token_ids=(70, 71, 72, 73),
    seed=5,
    logprobs=1,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def cluster(half_cluster: LocalCluster) -> LocalCluster:
    return half_cluster


@pytest.fixture(scope="module")
def folders(half_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return the folders of `--speculative-model`, by method. The draft model has other heads."""
    return {
        "eagle": make_eagle_folder(tmp_path_factory.mktemp("eagle"), half_folder),
        "eagle3": make_head_folder(tmp_path_factory.mktemp("head"), half_folder),
        "draft": make_model_folder(
            tmp_path_factory.mktemp("draft"),
            VARIANTS["qwen3-bf16" if kernels_by_variant() else "qwen3"],
        ),
    }


@pytest.fixture(scope="module")
def make_speculating(half_options: MakeOptions, folders: Mapping[str, Path]) -> MakeOptions:
    """Return a factory of options for two decode nodes that speculate by a method."""

    def make(method: str) -> ClusterOptions:
        options = half_options(num_decode=2)
        folder = ("--speculative-model", str(folders[method])) if method in folders else ()
        speculative = ("--speculative", f"{method}:4:fixed", *folder, "--metrics-port", "0")
        return replace(options, node_arguments=(*options.node_arguments, *speculative))

    return make


@pytest.fixture(scope="module", params=METHODS)
def speculating(
    request: pytest.FixtureRequest, make_speculating: MakeOptions
) -> Iterator[LocalCluster]:
    with LocalCluster(make_speculating(request.param)) as running:
        yield running


def requests() -> list[ClientRequest]:
    prompts = [prompt_of(9) * 3, prompt_of(40), (70, 71, 72) * 9, prompt_of(150)]
    samplings = [
        SEEDED,
        replace(SEEDED, temperature=0.0, presence_penalty=0.3),
        replace(SEEDED, stop_token_ids=(73,), min_tokens=12),
        replace(SEEDED, max_tokens=23),
    ]
    return [ClientRequest(prompt, Generation(one)) for prompt in prompts for one in samplings]


def test_answers_equal_those_without_speculation(
    cluster: LocalCluster, speculating: LocalCluster
) -> None:
    plain = answer_all(cluster.address, requests())
    speculated = answer_all(speculating.address, requests())

    for one, other in zip(plain, speculated, strict=True):
        assert other.token_ids == one.token_ids
        assert other.finish.reason == one.finish.reason
        assert other.finish.stop_token_id == one.finish.stop_token_id
        assert other.finish.served.prompt_tokens_computed_on_decode == 0
        assert one.finish.served.tokens_proposed == 0
    assert sum(one.finish.served.tokens_accepted for one in speculated) > 0


@pytest.mark.parametrize(
    ("speculating", "method"),
    [(name, name) for name in (*METHODS[1:], "eagle")],
    indirect=["speculating"],
)
def test_drafts_go_on_after_a_hand_off_as_on_one_node(
    speculating: LocalCluster, method: str, folders: Mapping[str, Path], half_folder: Path
) -> None:
    # Each prompt, and each of the samplings.
    requested = [one for place, one in enumerate(requests()) if place // 4 == place % 4]

    served = [
        one.finish.served for one in answer_all(speculating.address, requested, num_at_once=1)
    ]

    with LLM(
        str(half_folder),
        kv_cache_memory="16MiB",
        speculative=f"{method}:4:fixed",
        speculative_model=str(folders[method]),
    ) as llm:
        for one in requested:
            sampling = one.generation.sampling
            assert isinstance(sampling, SamplingParams)
            llm.generate([one.prompt], sampling)
        stats = llm.engine.scheduler.stats()
    assert sum(each.tokens_proposed for each in served) == stats.total_proposed_tokens
    assert sum(each.tokens_accepted for each in served) == stats.total_accepted_tokens > 0


@pytest.mark.parametrize(
    ("drafting", "conversion"),
    [(LegKind.DECODE, "num_layers 2 to 3"), (LegKind.PREFILL, "num_layers 3 to 2")],
)
def test_a_node_with_a_draft_head_and_one_without_are_a_pair(
    drafting: LegKind,
    conversion: str,
    cluster: LocalCluster,
    half_options: MakeOptions,
    folders: Mapping[str, Path],
) -> None:
    head = ("--speculative", "eagle3:4:fixed", "--speculative-model", str(folders["eagle3"]))
    is_decode = drafting is LegKind.DECODE
    options = replace(
        half_options(),
        prefill_arguments=() if is_decode else head,
        decode_arguments=("--kv-staging-memory", "1MiB", *(head if is_decode else ())),
    )
    plain = answer_all(cluster.address, requests())

    with LocalCluster(options) as unlike:
        found = answer_all(unlike.address, requests())

    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    served = [one.finish.served for one in found]
    assert {one.kv_conversion for one in served if one.is_prefill_remote} == {conversion}
    assert all(one.prompt_tokens_computed_on_decode == 0 for one in served)
    assert (sum(one.tokens_accepted for one in served) > 0) is is_decode


def constrained_requests() -> list[ClientRequest]:
    """Return constrained requests, half of which reason first until a likely token."""
    form = StructuredOutputs(regex="([ab]{2}-){9,12}c")
    plain = SamplingParams(max_tokens=90, seed=3, temperature=0.7, structured_outputs=form)
    samplings = [plain, replace(plain, temperature=0.0)]
    samplings += [
        replace(one, reasoning=ReasoningSection((50,)), logit_bias={50: 6.0}) for one in samplings
    ]
    prompts = [prompt_of(9) * 3, prompt_of(40)]
    return [ClientRequest(prompt, Generation(one)) for prompt in prompts for one in samplings]


def test_constrained_answers_equal_those_without_speculation(
    cluster: LocalCluster, speculating: LocalCluster
) -> None:
    plain = answer_all(cluster.address, constrained_requests())
    speculated = answer_all(speculating.address, constrained_requests())

    assert [one.token_ids for one in speculated] == [one.token_ids for one in plain]
    assert {one.finish.reason for one in speculated} == {"stop"}
    assert sum(one.finish.served.tokens_accepted for one in speculated) > 0
    assert all(one.finish.served.prompt_tokens_computed_on_decode == 0 for one in speculated)


def test_a_stop_string_among_accepted_tokens_ends_the_answer(
    cluster: LocalCluster, speculating: LocalCluster
) -> None:
    # One repeated token: every draft is accepted, and the string ends inside of one.
    sampling = replace(SEEDED, allowed_token_ids=(70,))
    with Client(cluster.address) as one, Client(speculating.address) as other:
        letter = one.generate("x", Generation(replace(sampling, max_tokens=1))).text
        requested = Generation(sampling, stop=(letter * 9,))

        plain, speculated = one.generate("x", requested), other.generate("x", requested)

    assert plain.finish is not None
    assert speculated.finish is not None
    assert speculated.finish.stop_string == letter * 9
    assert speculated.text == plain.text
    assert speculated.token_ids == plain.token_ids
    assert len(speculated.logprobs) == len(speculated.token_ids)


# Random tokens do not repeat. The head has random weights, but draws as the model does, which in
# float32 it guesses once.
@pytest.mark.parametrize(
    ("speculating", "temperature", "guessed"),
    [("ngram", 5.0, 0), ("eagle3", 0.0, 0 if kernels_by_variant() else 1)],
    indirect=["speculating"],
)
def test_a_prediction_is_proposed_and_does_not_change_the_answer(
    temperature: float, guessed: int, cluster: LocalCluster, speculating: LocalCluster
) -> None:
    sampling = replace(SEEDED, temperature=temperature, allowed_token_ids=None)
    with Client(cluster.address) as one, Client(speculating.address) as other:
        plain = other.generate(prompt_of(40), Generation(sampling))
        predicted = Generation(sampling, prediction=plain.text)
        ignored = one.generate(prompt_of(40), predicted)
        followed = other.generate(prompt_of(40), predicted)

    assert ignored.token_ids == followed.token_ids == plain.token_ids
    assert plain.finish is not None
    assert ignored.finish is not None
    assert followed.finish is not None
    # The text of random tokens does not begin with the same tokens everywhere.
    assert plain.finish.served.tokens_accepted == guessed
    assert followed.finish.served.tokens_accepted > guessed
    assert followed.finish.warnings == plain.finish.warnings == ()
    [warning] = ignored.finish.warnings
    assert "--speculative" in warning


# A draft model: `tests/chaos/test_random_requests.py`.
@pytest.mark.parametrize("method", METHODS[:2])
def test_a_speculating_stream_continues_on_another_node_when_its_node_is_killed(
    method: str, make_speculating: MakeOptions, cluster: LocalCluster
) -> None:
    sampling = replace(SEEDED, max_tokens=300)
    with (
        LocalCluster(make_speculating(method)) as broken,
        Client(broken.address) as client,
    ):
        with suspended(*broken.decodes):  # or the answer may be whole before that
            stream = client.stream(prompt_of(40), Generation(sampling))
            chunks = [next(stream)]  # sampled on prefill
            kill_the_writer(broken)
        chunks += stream

    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    with Client(cluster.address) as client:
        assert token_ids == client.generate(prompt_of(40), Generation(sampling)).token_ids
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.served.attempts > 1


def test_proposed_and_accepted_tokens_agree_in_answers_nodes_and_metrics(
    speculating: LocalCluster,
) -> None:
    before = [Scrape(child) for child in speculating.decodes]
    sampling = replace(SEEDED, allowed_token_ids=(70,))
    with Client(speculating.address) as client:
        answer = client.generate(prompt_of(7), Generation(sampling))
        assert answer.finish is not None
        served = answer.finish.served
        for child in speculating.decodes:
            await_load(child.address, lambda load: not is_busy(load))
    nodes = asyncio.run(seen(speculating.address))

    assert 0 < served.tokens_accepted <= served.tokens_proposed
    since = [Scrape(child) - was for child, was in zip(speculating.decodes, before, strict=True)]
    for kind, reported in (
        ("proposed", served.tokens_proposed),
        ("accepted", served.tokens_accepted),
    ):
        assert sum(one.total(SPECULATED, kind=kind) for one in since) == reported
    decodes = [node for node in nodes if LegKind.DECODE in node.legs]
    scraped = sum(Scrape(child).total(SPECULATED, kind="accepted") for child in speculating.decodes)
    assert sum(node.totals.num_accepted_tokens for node in decodes) == scraped
    prefills = [node for node in nodes if LegKind.PREFILL in node.legs]
    assert {node.totals.num_proposed_tokens for node in prefills} == {0}


async def seen(address: str) -> tuple[NodeStatus, ...]:
    async with AsyncClient(address) as client, aclosing(client.nodes()) as looks:
        return await anext(looks)
