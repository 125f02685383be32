"""Cluster of docker-compose.yml in real containers. Run it with `make containers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest
from threading import Event, Semaphore

import pytest

from baton.client import Answer, Client, Generation
from baton.client.retries import Retries
from baton.core.sampling import SamplingParams
from tests.containers.compose import ContainerCluster, log_of, run

pytestmark = pytest.mark.containers

PATIENCE_S = 120.0
NUM_AT_ONCE = 4
# The fifth token of each answer is a near tie, so that any numerical difference between nodes or
# attempts changes the answer.
NEAR_TIES = tuple(
    f"# Request {number} of many, long enough to fill some blocks.\n" + "import os, sys\n" * 20
    for number in range(12)
)
# Each prompt has a distinct answer, which reveals tokens delivered to the wrong request.
DISTINCT = tuple(f"    value = {number}\n" * 20 for number in (0, 4, 6, 35, 36, 60))
PROMPTS = (*NEAR_TIES, *DISTINCT)


def generate(client: Client, prompt: str) -> Answer:
    sampling = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    return client.generate(prompt, Generation(sampling))


@contextmanager
def connected(cluster: ContainerCluster) -> Iterator[Client]:
    """Yield a client without retries: recovery is up to the router alone."""
    with Client(cluster.address, timeout_s=PATIENCE_S, retries=Retries(max_attempts=1)) as client:
        yield client


class Load:
    """Continuous requests on several threads, until stopped."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_over = Event()
        self._answered = Semaphore(0)
        self.answers: list[tuple[str, Answer]] = []

    def await_answers(self, count: int) -> None:
        """Wait for `count` further answers."""
        while self._answered.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self._answered.acquire(timeout=PATIENCE_S)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the load within the block. Raises the first error of a request."""
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            workers: list[Future[None]] = [threads.submit(self._work) for _ in range(NUM_AT_ONCE)]
            try:
                yield
            finally:
                self._is_over.set()
        for worker in workers:
            worker.result()

    def _work(self) -> None:
        while not self._is_over.is_set():
            for prompt in PROMPTS:
                self.answers.append((prompt, generate(self._client, prompt)))
                self._answered.release()


def check_answers_while(cluster: ContainerCluster, disturb: Callable[[Load], object]) -> None:
    """Check that every request is answered, and with the tokens of an undisturbed cluster."""
    with connected(cluster) as client:
        quiet = {prompt: generate(client, prompt) for prompt in PROMPTS}
        assert len({tuple(quiet[prompt].token_ids) for prompt in DISTINCT}) == len(DISTINCT)
        load = Load(client)
        with load.running():
            load.await_answers(NUM_AT_ONCE)
            disturb(load)
            load.await_answers(2 * NUM_AT_ONCE)

    wrong = [
        difference(answer, quiet[prompt])
        for prompt, answer in load.answers
        if answer.token_ids != quiet[prompt].token_ids
    ]
    assert not wrong, "\n".join(wrong)


def difference(answer: Answer, quiet: Answer) -> str:
    """Return the first difference, and the nodes and attempts behind both answers."""
    pairs = zip_longest(answer.token_ids, quiet.token_ids)
    place, (found, wanted) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    served = [one.finish and one.finish.served for one in (answer, quiet)]
    return f"token {place} is {found}, not {wanted}: {served[0]}; in quiet: {served[1]}"


def test_kv_is_transferred_between_containers(cluster: ContainerCluster) -> None:
    before = cluster.received_bytes("decode")

    with connected(cluster) as client:
        answers = [
            generate(client, f"# {number}\n" + prompt) for number, prompt in enumerate(PROMPTS)
        ]

    served = [answer.finish.served for answer in answers if answer.finish is not None]
    kv_bytes = sum(one.kv_bytes for one in served)
    assert [one.prompt_tokens_computed_on_decode for one in served] == [0] * len(PROMPTS)
    assert kv_bytes > 0
    assert cluster.received_bytes("decode") - before > kv_bytes


def test_the_image_has_kernels_for_this_processor(cluster: ContainerCluster) -> None:
    logs = [log_of(one) for one in cluster.containers("prefill", "decode")]

    assert all("serves" in log and "plain torch" not in log for log in logs), logs


def test_killing_a_prefill_container_fails_no_request(cluster: ContainerCluster) -> None:
    def kill_busy_node(load: Load) -> None:
        finish = load.answers[-1][1].finish
        assert finish is not None
        run("docker", "kill", cluster.container_of("prefill", finish.served.prefill_node))

    check_answers_while(cluster, kill_busy_node)


def test_scaling_down_and_up_fails_no_request(cluster: ContainerCluster) -> None:
    def scale(load: Load) -> None:
        cluster.scale(prefill=2, decode=1)
        load.await_answers(NUM_AT_ONCE)
        cluster.scale(prefill=1, decode=3)

    check_answers_while(cluster, scale)


def test_a_stopped_cluster_finishes_its_requests(cluster: ContainerCluster) -> None:
    with connected(cluster) as client, ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        streams = [
            client.stream(
                prompt,
                Generation(SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)),
            )
            for prompt in PROMPTS[:NUM_AT_ONCE]
        ]
        for stream in streams:
            next(stream)  # under way
        rest = [threads.submit(list, stream) for stream in streams]
        cluster.compose("stop")
        lasts = [chunks.result()[-1] for chunks in rest]

    assert [last.finish.num_completion_tokens for last in lasts if last.finish] == [600] * 4
    assert cluster.exit_codes() == {0}
