"""Random requests on three deployments: every token equals that of `baton.LLM`.

The demo model runs on the native kernels, whose results do not depend on batch, chunking or
history. So each request has one correct answer, whichever nodes compute it.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import pytest

from baton.client import Answer, AsyncClient, Generation
from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.completion import Completion
from baton.core.logprobs import TokenLogprobs
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.llm import LLM
from tests.support.hypothesis_profiles import num_examples

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "demo")
NUM_REQUESTS = num_examples(40)
NUM_CLIENTS = 8
ANSWERS_PER_KILL = 8
MAX_MODEL_LEN = 1024
SPECULATION = ("--speculative", "ngram:4:fixed")
ASYNC = ("--async-scheduling",)
NODE = ("--kv-cache-memory", "8MiB", "--threads", "1", "--max-num-seqs", "32")

FORMS = (
    StructuredOutputs(regex="(yes|no|maybe)( [a-z]{1,6}){0,3}"),
    StructuredOutputs(choice=("return", "raise ValueError", "pass")),
    StructuredOutputs(
        json='{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},'
        ' "size": {"type": "integer"}}, "required": ["name", "size"],'
        ' "additionalProperties": false}'
    ),
)

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class RandomRequest:
    prompt: tuple[int, ...]
    generation: Generation

    @property
    def samplings(self) -> list[SamplingParams]:
        """Return the sampling parameters of the `n` answers: answer i uses the seed plus i."""
        sampling = self.generation.sampling
        assert isinstance(sampling, SamplingParams)
        assert sampling.seed is not None
        return [replace(sampling, seed=sampling.seed + i) for i in range(self.generation.n)]


def draw_requests(seed: int) -> list[RandomRequest]:
    draw = random.Random(seed)
    prefixes = [draw.choices(range(300, 2000), k=draw.randint(16, 400)) for _ in range(6)]
    return [_draw_request(draw, prefixes) for _ in range(NUM_REQUESTS)]


def _draw_request(draw: random.Random, prefixes: Sequence[Sequence[int]]) -> RandomRequest:
    shared = draw.choice(prefixes) if draw.random() < 0.5 else ()
    own = draw.choices(range(300, 2000), k=draw.choice([1, 3, 15, 16, 17, 40, 120]))
    if draw.random() < 0.3:  # something for the n-gram index to find
        own = own * 3
    prompt = (*shared, *own)
    if draw.random() < 0.05:
        prompt = (prompt * MAX_MODEL_LEN)[: MAX_MODEL_LEN - draw.randint(1, 8)]
    generation = Generation(
        _draw_sampling(draw, MAX_MODEL_LEN - len(prompt)),
        stop=draw.choice([(), (), (), (" ",), ("e", "\n\n"), ("self",)]),
        include_stop_in_output=draw.random() < 0.3,
        n=draw.choice([1, 1, 1, 1, 2, 3]),
    )
    return RandomRequest(prompt, generation)


def _draw_sampling(draw: random.Random, room: int) -> SamplingParams:
    form = draw.choice(FORMS) if draw.random() < 0.2 else None
    sampling = SamplingParams(
        max_tokens=min(room, draw.choice([1, 2, 8, 24, 60])),
        temperature=draw.choice([0.0, 0.0, 0.7, 1.0]),
        top_p=draw.choice([1.0, 0.9]),
        seed=draw.getrandbits(31),
        ignore_eos=form is None and draw.random() < 0.5,
        structured_outputs=form,
        logprobs=draw.choice([None, None, 0, 3]),
        prompt_logprobs=draw.choice([None, None, None, None, 2]),
    )
    if draw.random() < 0.2:
        return replace(sampling, repetition_penalty=1.2, frequency_penalty=0.3)
    return sampling


@pytest.fixture(scope="module")
def requests() -> list[RandomRequest]:
    return draw_requests(seed=21)


@pytest.fixture(scope="module")
def expected(requests: list[RandomRequest]) -> Iterator[list[list[Completion]]]:
    """Yield the answers of `baton.LLM`, in this process, to each request."""
    with LLM(MODEL, kv_cache_memory="64MiB", num_threads=1, show_progress=False) as llm:
        yield _answers_of(llm, requests)


def _answers_of(llm: LLM, requests: Sequence[RandomRequest]) -> list[list[Completion]]:
    """Group the requests by stop rule, since `LLM.generate` takes one per call."""
    places_by_rule = defaultdict(list)
    for place, request in enumerate(requests):
        generation = request.generation
        places_by_rule[generation.stop, generation.include_stop_in_output].append(place)
    answers: dict[int, list[Completion]] = {}
    for (stop, included), places in places_by_rule.items():
        flat = [
            (requests[place].prompt, one) for place in places for one in requests[place].samplings
        ]
        completions = iter(
            llm.generate(
                [prompt for prompt, _ in flat],
                [sampling for _, sampling in flat],
                stop=stop,
                include_stop_in_output=included,
            )
        )
        for place in places:
            answers[place] = [next(completions) for _ in requests[place].samplings]
    return [answers[place] for place in range(len(requests))]


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        pytest.param(
            ClusterOptions(MODEL, is_colocated=True, node_arguments=NODE + SPECULATION),
            False,
            id="colocated-speculation",
        ),
        pytest.param(ClusterOptions(MODEL, node_arguments=NODE + ASYNC), False, id="1P1D-async"),
        pytest.param(
            ClusterOptions(MODEL, 2, 2, node_arguments=NODE + SPECULATION),
            True,
            id="2P2D-kills-speculation",
        ),
    ],
)
def test_every_random_request_gets_the_tokens_of_the_local_engine(
    options: ClusterOptions,
    kills: bool,
    requests: list[RandomRequest],
    expected: list[list[Completion]],
) -> None:
    with LocalCluster(options) as cluster:
        answers, num_killed = asyncio.run(_answer_all(cluster, requests, kills))

    assert (num_killed > 0) is kills
    wrong = [
        (place, difference)
        for place, (mine, right) in enumerate(zip(answers, expected, strict=True))
        if (difference := _difference(mine, right))
    ]
    assert not wrong, wrong


async def _answer_all(
    cluster: LocalCluster, requests: Sequence[RandomRequest], kills: bool
) -> tuple[list[list[Answer]], int]:
    """Return the answers in the order of `requests`, and the number of nodes killed meanwhile."""
    answers: list[list[Answer] | None] = [None] * len(requests)
    places = iter(range(len(requests)))
    num_answered = asyncio.Semaphore(0)

    async def send_on(client: AsyncClient) -> None:
        for place in places:
            request = requests[place]
            answers[place] = await client.generate_all(request.prompt, request.generation)
            num_answered.release()

    async with AsyncClient(cluster.address, timeout_s=240) as client, asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(send_on(client)) for _ in range(NUM_CLIENTS)]
        num_killed = 0
        if kills:
            num_killed = await _kill_in_turn(cluster, num_answered, len(requests))
        await asyncio.gather(*clients)
    return [answer for answer in answers if answer is not None], num_killed


async def _kill_in_turn(
    cluster: LocalCluster, num_answered: asyncio.Semaphore, num_requests: int
) -> int:
    """Kill and restart one node after another, each time after some more answers."""
    num_kills = num_requests // ANSWERS_PER_KILL - 1
    for i, siblings in zip(range(num_kills), cycle((cluster.decodes, cluster.prefills))):
        for _ in range(ANSWERS_PER_KILL):
            await num_answered.acquire()
        await asyncio.to_thread(_kill_and_restart, cluster, siblings[i // 2 % len(siblings)])
    return num_kills


def _kill_and_restart(cluster: LocalCluster, node: Child) -> None:
    node.process.kill()
    node.process.wait()
    cluster.restart(node)


def _difference(answers: Sequence[Answer], expected: Sequence[Completion]) -> str:
    if len(answers) != len(expected):
        return f"{len(answers)} answers instead of {len(expected)}"
    return next(filter(None, map(_difference_of_one, answers, expected)), "")


def _difference_of_one(answer: Answer, expected: Completion) -> str:
    assert answer.finish is not None
    assert expected.finish_reason is not None
    pairs: dict[str, tuple[object, object]] = {
        "tokens": (answer.token_ids, expected.token_ids),
        "text": (answer.text, expected.text),
        "finish reason": (answer.finish.reason, expected.finish_reason.name.lower()),
        "stop string": (answer.finish.stop_string, expected.stop_string),
        "logprobs": (_rounded(answer.logprobs), _rounded(expected.logprobs)),
        "prompt logprobs": (_rounded(answer.prompt_logprobs), _rounded(expected.prompt_logprobs)),
    }
    return next((f"{name}: {a} != {b}" for name, (a, b) in pairs.items() if a != b), "")


def _rounded(logprobs: Sequence[TokenLogprobs | None]) -> list[object]:
    return [one and (one.token_id, round(one.logprob, 4)) for one in logprobs]
