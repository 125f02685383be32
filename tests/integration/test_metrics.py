"""Metrics of three processes against the client's counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import BatonError, Client, Finish, Generation
from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.fork_server import ForkServer
from baton.telemetry.metrics import names as metrics
from tests.support.llm_d_metrics import EndpointMetrics, extract
from tests.support.models import prompt_of
from tests.support.nodes import await_load, is_busy
from tests.support.scrapes import Scrape, plain_page, scraped

ROUTER_METRICS = (
    metrics.DURATION, metrics.TIME_TO_FIRST_TOKEN, metrics.TIME_PER_TOKEN, metrics.QUEUE_WAIT,
    metrics.REQUESTS, metrics.REFUSALS, metrics.TOKENS, metrics.ATTEMPTS, metrics.SUSPECTS,
    metrics.REQUEST_KV_BYTES, metrics.QUEUE_DEPTH, metrics.IN_FLIGHT, metrics.OPEN_NODES,
    metrics.TRACES_LOST, metrics.READINGS_AGE,
)  # fmt: skip
NODE_METRICS = (
    metrics.RANKS, metrics.COLLECTIVES,
    metrics.STEP, metrics.BATCH, metrics.SILENCE, metrics.PROMPT_TOKENS_COMPUTED,
    metrics.SAMPLED_TOKENS, metrics.PASSES, metrics.SPECULATED_TOKENS, metrics.HANDOFFS,
    metrics.PICTURES, metrics.ENCODER_ROWS,
    metrics.KV_BYTES, metrics.STAGED_BYTES, metrics.STAGED_COPY,
    metrics.TRANSFER, metrics.RATE, metrics.OVERLAP, metrics.RUNNING, metrics.WAITING,
    metrics.BLOCKS, metrics.PREEMPTIONS, metrics.PREFIX_TOKENS, metrics.OPEN_HANDOFFS,
    metrics.DIGEST_MISMATCHES, metrics.LINKS, metrics.LINKS_CUT, metrics.MESSAGES_DROPPED,
    metrics.TRANSPORT, metrics.TRACES_LOST, metrics.TIER_BYTES, metrics.TIER_LIMIT,
    metrics.TIER_LOAD, metrics.TIER_TOKENS, metrics.GROUP_BLOCKS, metrics.GROUP_HITS,
    metrics.GROUP_EVICTIONS, metrics.TIER_BLOCKS, metrics.TIER_LOADED, metrics.TIER_STORED,
    metrics.TIER_EVICTED, metrics.TIER_FAILED, metrics.TIER_RETAINED, metrics.TIER_REFUSED,
    metrics.TIER_USABLE, metrics.PULL_BLOCKS, metrics.CONNECTOR_ERRORS, metrics.READINGS_AGE,
    metrics.ADAPTERS, metrics.ADAPTER_BYTES, metrics.ADAPTER_WAITING, metrics.ADAPTER_LOAD,
    metrics.ADAPTER_FAILURES, metrics.ADAPTER_EVICTIONS, metrics.DRAFTS_PROPOSED,
    metrics.DRAFTS_ACCEPTED,
)  # fmt: skip
DECODE_METRICS = (
    *NODE_METRICS,
    *(metrics.FOREIGN_BYTES, metrics.FOREIGN_BLOCKS, metrics.FOREIGN_FAILURES),
)
GOLDEN = Path(__file__).parent.parent / "golden" / "metrics.txt"
REQUESTS = "baton_requests_total"
NUM_CANCELLED_TOKENS = 20
ANY_PORT = ("--metrics-port", "0")
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def counted(
    cluster_options: Callable[..., ClusterOptions], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    options = cluster_options(router_arguments=ANY_PORT)
    tiers = ("--kv-host-memory", "1MiB", "--kv-folder", str(tmp_path_factory.mktemp("kv")))
    options = replace(
        options,
        node_arguments=(*options.node_arguments, *ANY_PORT, *tiers),
        # A server that no request names.
        decode_arguments=(*options.decode_arguments, "--kv-sources", "vllm://127.0.0.1:1"),
    )
    with LocalCluster(options) as running:
        yield running


def test_metrics_equal_the_counts_of_the_client(counted: LocalCluster) -> None:
    router_before = Scrape(counted.router)
    prefill_before, decode_before = map(Scrape, (*counted.prefills, *counted.decodes))
    with Client(counted.address, timeout_s=60) as client:
        finishes = [served(client, number) for number in range(4)]
        reasons = Counter(refused(client, *one) for one in (((5,), "other"), ((), ""), ((5,), "x")))
        cancelled(client)
    for child in (*counted.prefills, *counted.decodes):
        await_load(child.address, lambda load: not is_busy(load))

    router = scraped(
        counted.router,
        lambda one: (one - router_before).total(REQUESTS, outcome="cancelled") > 0,
    )
    router -= router_before
    prefill = Scrape(counted.prefills[0]) - prefill_before
    decode = Scrape(counted.decodes[0]) - decode_before

    assert router.total(REQUESTS, outcome="ok") == len(finishes)
    assert router.total(REQUESTS, outcome="cancelled") == 1
    assert router.by_label("baton_refusals_total", "reason") == reasons
    requested = sum(one.num_prompt_tokens for one in finishes)
    given = sum(one.num_completion_tokens for one in finishes)
    assert router.total("baton_tokens_total", kind="input", outcome="ok") == requested
    assert router.total("baton_tokens_total", kind="output", outcome="ok") == given
    kv_bytes = sum(one.served.kv_bytes for one in finishes)
    assert router.total("baton_request_kv_bytes_total") == kv_bytes
    assert router.total("gen_ai_server_time_to_first_token_seconds_count") == len(finishes) + 1
    # The hand-off of the cancelled request may have completed before.
    received = decode.total("baton_kv_bytes_total", direction="received")
    assert received >= kv_bytes
    assert prefill.total("baton_kv_bytes_total", direction="sent") >= received
    assert prefill.total("baton_handoffs_total", outcome="done") >= len(finishes)
    assert decode.total("baton_prompt_tokens_computed_total") == 0
    all_asked = router.total("baton_tokens_total", kind="input")
    assert all_asked == requested + NUM_CANCELLED_TOKENS
    assert prefill.total("baton_prompt_tokens_computed_total") == all_asked
    assert router.by_label("baton_attempts_total", "kind") == {"first": len(finishes) + 1}


def test_an_idle_cluster_has_every_block_free(counted: LocalCluster) -> None:
    with Client(counted.address, timeout_s=60) as client:
        served(client, 40)
    for child in (*counted.prefills, *counted.decodes):
        await_load(child.address, lambda load: not is_busy(load))

    nodes = Scrape(counted.router).by_label("baton_nodes_open", "role")
    assert nodes == {"encode": 2, "prefill": 1, "decode": 1}
    for child in (*counted.prefills, *counted.decodes):
        node = Scrape(child)
        blocks = node.by_label("baton_kv_blocks", "state")
        assert blocks["free"] + blocks["cached"] == sum(blocks.values()) > 0
        assert node.by_label("baton_kv_links", "state") == {"up": 1, "opening": 0}
        assert node.by_label("baton_kv_transport", "transport") == {"nixl": 1}
        waiting = node.by_label("baton_requests_waiting", "status")
        held = ("waiting", "waiting_for_remote_kvs", "waiting_for_fsm", "ready")
        assert waiting == dict.fromkeys(held, 0)
        assert node.total("baton_requests_running") == 0
        num_blocks = int(sum(blocks.values()))
        assert extract(plain_page(child)) == EndpointMetrics(0, 0, 0.0, BLOCK_SIZE, num_blocks)


def test_every_metric_is_exported_with_its_documented_name_and_labels(
    counted: LocalCluster,
) -> None:
    with Client(counted.address, timeout_s=60) as client:
        served(client, 50)
        refused(client, (5,), "other")
    for child in (*counted.prefills, *counted.decodes):
        await_load(child.address, lambda load: not is_busy(load))

    reported: dict[str, set[str]] = {}
    for child, expected in (
        (counted.router, ROUTER_METRICS),
        (counted.prefills[0], NODE_METRICS),
        (counted.decodes[0], DECODE_METRICS),
    ):
        scrape = Scrape(child)
        names = {family.name for family in scrape.families}
        assert {name for name in names if not name.startswith("vllm:")} == {
            one.prometheus for one in expected
        }
        for sample in scrape.samples:
            if not sample.name.endswith("_created"):
                reported.setdefault(sample.name, set()).update(sample.labels)

    lines = [" ".join([name, *sorted(labels)]) for name, labels in sorted(reported.items())]
    assert lines == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_hand_offs_have_exemplars_on_both_sides(counted: LocalCluster) -> None:
    with Client(counted.address, timeout_s=60) as client:
        trace_id = served(client, 60).served.trace_id

    for child in (*counted.prefills, *counted.decodes):
        scrape = scraped(child, lambda one: trace_id in one.exemplars)
        assert scrape.exemplars[trace_id].startswith("baton_kv_")


def test_the_exemplar_of_a_slow_request_is_its_trace(counted: LocalCluster) -> None:
    with Client(counted.address, timeout_s=60) as client:
        answer = client.generate(prompt_of(25, seed=3), greedy(4))
    assert answer.finish is not None

    trace_id = answer.finish.served.trace_id

    scrape = scraped(counted.router, lambda one: trace_id in one.exemplars)

    assert scrape.exemplars[trace_id] == "gen_ai_server_request_duration_seconds_bucket"


def test_a_refusal_is_one_log_line_with_its_trace_and_without_the_prompt(
    counted: LocalCluster,
) -> None:
    with Client(counted.address, timeout_s=60) as client:
        refused(client, (5, 31337), "other")
    scraped(counted.router, lambda _: "UNKNOWN_MODEL" in counted.router.log)

    [line] = [one for one in counted.router.log.splitlines() if "UNKNOWN_MODEL" in one][-1:]

    assert re.search(r"request ended request_id=\S+ outcome=refused .*trace_id=[0-9a-f]{32}$", line)
    assert "31337" not in line


def test_a_process_without_a_terminal_logs_json() -> None:
    arguments = ("router", "--decode-nodes", "127.0.0.1:1", "--port", "0", *ANY_PORT)
    child = Child("router", arguments, ClusterOptions(""), ForkServer())
    try:
        child.await_address(60)
    finally:
        child.stop()

    lines = [json.loads(line) for line in child.log.splitlines()]
    assert any("metrics on http://127.0.0.1:" in line["message"] for line in lines)
    assert {line["role"] for line in lines} == {"router"}


def served(client: Client, number: int) -> Finish:
    answer = client.generate(prompt_of(30 + number, seed=number), greedy(5 + number))
    assert answer.finish is not None
    return answer.finish


def refused(client: Client, prompt: tuple[int, ...], model: str) -> str:
    with pytest.raises(BatonError) as refusal:
        client.generate(prompt, replace(greedy(3), model=model))
    return refusal.value.reason


def cancelled(client: Client) -> None:
    stream = client.stream(prompt_of(NUM_CANCELLED_TOKENS, seed=9), greedy(400))
    next(stream)
    stream.close()


def greedy(max_tokens: int) -> Generation:
    return Generation(SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
