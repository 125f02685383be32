"""Random requests on three deployments: every token equals that of `baton.LLM`.

More methods and deployments: `python -m tests.support.random_drafts`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster import ClusterOptions, LocalCluster
from baton.completion import Completion
from baton.llm import LLM
from tests.support.hypothesis_profiles import num_examples
from tests.support.random_drafts import ANSWERS_PER_KILL, answer_all
from tests.support.random_requests import (
    RandomRequest,
    RequestWorld,
    answers_alone,
    difference,
    draw_requests,
)

MODELS = Path(__file__).resolve().parents[2] / "models"
MODEL = str(MODELS / "demo")
NUM_REQUESTS = num_examples(40)
NUM_CLIENTS = 8
SUFFIX = ("--speculative", "suffix:4:fixed")
EAGLE3 = ("--speculative", "eagle3:3:fixed", "--speculative-model", f"{MODELS}/demo-eagle3")
DRAFT = ("--speculative", "draft:3:fixed", "--speculative-model", MODEL)
ASYNC = ("--async-scheduling",)
NODE = ("--kv-cache-memory", "8MiB", "--threads", "1", "--max-num-seqs", "32")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def requests() -> list[RandomRequest]:
    return draw_requests(RequestWorld(1024, range(300, 2000)), seed=21, count=NUM_REQUESTS)


@pytest.fixture(scope="module")
def expected(requests: list[RandomRequest]) -> Iterator[list[list[Completion]]]:
    """Yield the answers of `baton.LLM`, in this process, to each request."""
    with LLM(MODEL, kv_cache_memory="64MiB", num_threads=1, show_progress=False) as llm:
        yield answers_alone(llm, requests)


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        pytest.param(
            ClusterOptions(MODEL, is_colocated=True, node_arguments=NODE + SUFFIX),
            False,
            id="colocated-suffix",
        ),
        pytest.param(
            ClusterOptions(MODEL, node_arguments=NODE + ASYNC + EAGLE3),
            False,
            id="1P1D-async-eagle3",
        ),
        pytest.param(
            ClusterOptions(MODEL, 2, 2, node_arguments=NODE + DRAFT),
            True,
            id="2P2D-kills-draft",
        ),
    ],
)
def test_every_random_request_gets_the_tokens_of_the_local_engine(
    options: ClusterOptions,
    kills: bool,
    requests: list[RandomRequest],
    expected: list[list[Completion]],
) -> None:
    num_kills = NUM_REQUESTS // ANSWERS_PER_KILL - 1 if kills else 0
    with LocalCluster(options) as cluster:
        answers = asyncio.run(answer_all(cluster, requests, NUM_CLIENTS, num_kills=num_kills))

    wrong = [
        (place, found)
        for place, (mine, right) in enumerate(zip(answers, expected, strict=True))
        if (found := difference(mine, right))
    ]
    assert not wrong, wrong
