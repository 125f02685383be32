"""Metrics against the client's counts, for requests that end in every possible way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from baton.client import BatonError, Chunk, Client, Finish, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.models import prompt_of
from tests.support.nodes import await_load, is_busy, kill_the_writer
from tests.support.scrapes import Scrape, scraped
from tests.support.suspended_processes import suspended

ANY_PORT = ("--metrics-port", "0")


@dataclass(slots=True)
class Ledger:
    """Counts of the client."""

    requests: Counter[str] = field(default_factory=Counter)
    requested: Counter[str] = field(default_factory=Counter)
    given: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    num_kv_bytes: int = 0

    def note(self, outcome: str, num_given: int) -> None:
        self.requests[outcome] += 1
        self.requested[outcome] += len(PROMPT)
        self.given[outcome] += num_given

    def note_whole(self, finish: Finish) -> None:
        self.requests["ok"] += 1
        self.requested["ok"] += finish.num_prompt_tokens
        self.given["ok"] += finish.num_completion_tokens
        self.num_kv_bytes += finish.served.kv_bytes


@pytest.fixture
def cluster(cluster_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    options = cluster_options(num_decode=2, router_arguments=ANY_PORT)
    options = replace(options, node_arguments=(*options.node_arguments, *ANY_PORT))
    with LocalCluster(options) as running:
        yield running
        running.decodes = [one for one in running.decodes if one.process.poll() is None]


def test_router_metrics_equal_client_counts_for_every_outcome(cluster: LocalCluster) -> None:
    ledger = Ledger()
    with Client(cluster.address, timeout_s=120) as client:
        for number in range(3):
            whole(client, ledger, number)
        assert_bytes_moved(cluster, ledger.num_kv_bytes)
        for prompt, model in (((5,), "other"), ((), ""), ((5,) * 600, "")):
            refused(client, ledger, prompt, model)
        with suspended(*cluster.decodes):  # the first token comes from prefill, and then no other
            cancelled(client, ledger)
            with Client(cluster.address, timeout_s=4) as hurried:
                broken(hurried.stream(PROMPT, LONG), ledger, "deadline_exceeded")
        failed_over(cluster, client, ledger)
        failed(cluster, client, ledger)

    router = scraped(
        cluster.router,
        lambda one: one.total("baton_requests_total") == sum(ledger.requests.values()),
    )

    assert by_outcome(router, "baton_requests_total") == ledger.requests
    assert by_outcome(router, "baton_tokens_total", kind="input") == ledger.requested
    assert by_outcome(router, "baton_tokens_total", kind="output") == ledger.given
    assert router.by_label("baton_refusals_total", "reason") == ledger.refusals
    assert router.total("baton_request_kv_bytes_total") == ledger.num_kv_bytes
    assert router.by_label("baton_attempts_total", "kind")["migrate"] >= 1


def whole(client: Client, ledger: Ledger, number: int) -> None:
    answer = client.generate(prompt_of(30 + number, seed=number), greedy(5 + number))
    assert answer.finish is not None
    ledger.note_whole(answer.finish)


def refused(client: Client, ledger: Ledger, prompt: tuple[int, ...], model: str) -> None:
    with pytest.raises(BatonError) as refusal:
        client.generate(prompt, replace(greedy(3), model=model))
    ledger.requests["refused"] += 1
    ledger.refusals[refusal.value.reason] += 1


def cancelled(client: Client, ledger: Ledger) -> None:
    stream = client.stream(PROMPT, LONG)
    num_given = len(next(stream).token_ids)
    stream.close()
    ledger.note("cancelled", num_given)


def broken(chunks: Iterator[Chunk], ledger: Ledger, outcome: str, num_before: int = 0) -> None:
    given: list[int] = []
    with pytest.raises(BatonError):
        given.extend(token_id for chunk in chunks for token_id in chunk.token_ids)
    ledger.note(outcome, num_before + len(given))


def failed_over(cluster: LocalCluster, client: Client, ledger: Ledger) -> None:
    """Kill the one of two decode nodes that generates the answer."""
    with suspended(*cluster.decodes):
        stream = client.stream(PROMPT, LONG)
        next(stream)
        kill_the_writer(cluster)
    [finish] = [chunk.finish for chunk in stream if chunk.finish is not None]
    assert finish.served.attempts > 1
    ledger.note_whole(finish)


def failed(cluster: LocalCluster, client: Client, ledger: Ledger) -> None:
    """Kill the last decode node."""
    left = [one for one in cluster.decodes if one.process.poll() is None]
    with suspended(*left):
        stream = client.stream(PROMPT, LONG)
        num_given = len(next(stream).token_ids)
        kill_the_writer(cluster)
    broken(stream, ledger, "failed", num_given)


def assert_bytes_moved(cluster: LocalCluster, num_bytes: int) -> None:
    """Check that senders and receivers count the bytes that the answers reported."""
    for node in (*cluster.prefills, *cluster.decodes):
        await_load(node.address, lambda load: not is_busy(load))
    for nodes in (cluster.prefills, cluster.decodes):
        counted = sum(Scrape(node).total("baton_kv_bytes_total") for node in nodes)
        assert counted == num_bytes > 0


def by_outcome(scrape: Scrape, name: str, **labels: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for sample in scrape.samples:
        if sample.name == name and labels.items() <= sample.labels.items():
            counts[sample.labels["outcome"]] += int(sample.value)
    return counts


def greedy(max_tokens: int) -> Generation:
    return Generation(SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


PROMPT = prompt_of(30, seed=9)
LONG = greedy(400)
