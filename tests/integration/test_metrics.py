"""Metrics of three processes against what the client itself counted."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.client import BatonError, Client, Finish, Generation
from baton.cluster import Child, ClusterOptions, LocalCluster
from engine.sampling import SamplingParams
from tests.support.models import prompt_of
from tests.support.nodes import await_load, is_busy

METRICS_AT = re.compile(r"metrics on (http://\S+)")
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
REQUESTS = "baton_requests_total"
MOST_SCRAPES = 500
ANY_PORT = ("--metrics-port", "0")


@pytest.fixture(scope="module")
def counted(cluster_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    options = cluster_options(router_arguments=ANY_PORT)
    options = replace(options, node_arguments=(*options.node_arguments, *ANY_PORT))
    with LocalCluster(options) as running:
        yield running


def test_metrics_and_the_client_count_alike(counted: LocalCluster) -> None:
    with Client(counted.address, timeout_s=60) as client:
        finishes = [served(client, number) for number in range(4)]
        reasons = Counter(refused(client, *one) for one in (((5,), "other"), ((), ""), ((5,), "x")))
        cancelled(client)
    for child in (*counted.prefills, *counted.decodes):
        await_load(child.address, lambda load: not is_busy(load))

    router = scraped(counted.router, lambda one: one.total(REQUESTS, outcome="cancelled") > 0)
    prefill, decode = (Scrape(child) for child in (*counted.prefills, *counted.decodes))

    assert router.total(REQUESTS, outcome="ok") == len(finishes)
    assert router.total(REQUESTS, outcome="cancelled") == 1
    assert router.by_label("baton_refusals_total", "reason") == reasons
    asked = sum(one.num_prompt_tokens for one in finishes)
    given = sum(one.num_completion_tokens for one in finishes)
    assert router.total("baton_tokens_total", kind="input") == asked
    assert router.total("baton_tokens_total", kind="output") == given
    kv_bytes = sum(one.served.kv_bytes for one in finishes)
    assert router.total("baton_request_kv_bytes_total") == kv_bytes
    assert router.total("gen_ai_server_time_to_first_token_seconds_count") == len(finishes) + 1
    assert router.by_label("baton_nodes_open", "role") == {"prefill": 1, "decode": 1}
    # The cancelled one may have been handed over before it was.
    received = decode.total("baton_kv_bytes_total", direction="received")
    assert received >= kv_bytes
    assert prefill.total("baton_kv_bytes_total", direction="sent") >= received
    assert prefill.total("baton_handoffs_total", outcome="done") >= len(finishes)
    assert decode.total("baton_prompt_tokens_computed_total") == 0
    assert prefill.total("baton_prompt_tokens_computed_total") >= asked
    for node in (prefill, decode):
        blocks = node.by_label("baton_kv_blocks", "state")
        assert blocks["free"] == blocks["all"] > 0
        assert node.total("baton_requests_running") == 0


def test_the_exemplar_of_a_slow_request_is_its_trace(counted: LocalCluster) -> None:
    with Client(counted.address, timeout_s=60) as client:
        answer = client.generate(prompt_of(25, seed=3), greedy(4))
    assert answer.finish is not None

    trace_id = answer.finish.served.trace_id

    scrape = scraped(counted.router, lambda one: trace_id in one.exemplars)

    assert scrape.exemplars[trace_id] == "gen_ai_server_request_duration_seconds_bucket"


def served(client: Client, number: int) -> Finish:
    answer = client.generate(prompt_of(30 + number, seed=number), greedy(5 + number))
    assert answer.finish is not None
    return answer.finish


def refused(client: Client, prompt: tuple[int, ...], model: str) -> str:
    with pytest.raises(BatonError) as refusal:
        client.generate(prompt, replace(greedy(3), model=model))
    return refusal.value.reason


def cancelled(client: Client) -> None:
    stream = client.stream(prompt_of(20, seed=9), greedy(400))
    next(stream)
    stream.close()


def scraped(child: Child, is_wanted: Callable[[Scrape], bool]) -> Scrape:
    """The first scrape that is as wanted; each takes its time, so that there is no need to wait."""
    for _ in range(MOST_SCRAPES):
        scrape = Scrape(child)
        if is_wanted(scrape):
            return scrape
    raise AssertionError(f"{child.name} never told what was wanted")


def greedy(max_tokens: int) -> Generation:
    return Generation(SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


class Scrape:
    """What a process told at one time."""

    def __init__(self, child: Child) -> None:
        address = METRICS_AT.search(child.log)
        assert address is not None, child.log
        request = urllib.request.Request(address[1], headers={"Accept": OPENMETRICS})
        with urllib.request.urlopen(request, timeout=10) as response:
            text = response.read().decode()
        parse: Any = text_string_to_metric_families
        families = parse(text)
        self.samples: list[Sample] = [one for family in families for one in family.samples]

    @property
    def exemplars(self) -> dict[str, str]:
        """By trace, the series that names it first."""
        return {
            one.exemplar.labels["trace_id"]: one.name
            for one in reversed(self.samples)
            if one.exemplar
        }

    def total(self, name: str, **labels: str) -> float:
        found = [one for one in self.samples if one.name == name]
        return sum(one.value for one in found if labels.items() <= one.labels.items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        return {one.labels[label]: one.value for one in self.samples if one.name == name}
