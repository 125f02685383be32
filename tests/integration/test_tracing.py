"""Traces of three processes as received by a collector, over real gRPC and OTLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import BatonError, Client, Finish, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.telemetry import names
from baton.telemetry.tracing.spans import SpanStatus
from tests.support.collector import Collected, Collector, collecting
from tests.support.models import Variant, make_model_folder, prompt_of
from tests.support.nodes import await_reported, kill_the_writer
from tests.support.suspended_processes import suspended

TRACED = "00-{trace_id}-{parent_id}-01"
REMOTE = {
    ("baton-router", "generate"): {
        *("baton.role", "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"),
        *("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
        *("gen_ai.response.finish_reasons", "gen_ai.server.time_to_first_token"),
        *("baton.served", "baton.attempts", "rpc.system.name", "rpc.method"),
        *("rpc.response.status_code", "baton.kv.bytes", "baton.kv.transport"),
    },
    ("baton-router", "admit"): {"baton.queue.position", "baton.queue.wait"},
    ("baton-router", "route"): {
        *("baton.attempt", "baton.route.policy", "baton.route.predicted_hit_tokens"),
        *("baton.route.candidates.prefill", "baton.route.candidates.decode"),
        *("baton.route.chosen.prefill", "baton.route.chosen.decode"),
    },
    ("baton-router", "prefill"): {"baton.node.id", "baton.node.incarnation", "baton.attempt"},
    ("baton-router", "decode"): {"baton.node.id", "baton.node.incarnation", "baton.attempt"},
    ("baton-prefill", "prefill"): {"baton.node.id", "baton.role", "rpc.response.status_code"},
    ("baton-prefill", "prefill_wait"): {"baton.wait_for"},
    ("baton-prefill", "prefill_compute"): {
        *("baton.tokens", "baton.tokens.cached", "baton.steps", "baton.preemptions"),
    },
    ("baton-prefill", "kv_push"): {
        *("baton.kv.bytes", "baton.kv.blocks", "baton.kv.descriptors", "baton.kv.writes"),
        *("baton.kv.transport", "baton.kv.gigabytes_per_second", "baton.kv.overlap"),
        *("baton.kv.peer", "baton.kv.verified"),
    },
    ("baton-decode", "decode"): {"baton.node.id", "baton.role", "rpc.response.status_code"},
    ("baton-decode", "kv_wait"): {"baton.kv.bytes", "baton.kv.blocks", "baton.kv.transport"},
    ("baton-decode", "decode_wait"): {"baton.wait_for"},
    ("baton-decode", "decode_compute"): {
        *("baton.tokens", "baton.steps", "baton.preemptions", "baton.time_per_token"),
    },
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose longest answer takes several seconds, so that it can be cancelled in time."""
    folder = tmp_path_factory.mktemp("models") / "long"
    return make_model_folder(folder, Variant("Llama", {"max_position_embeddings": LONG_CONTEXT}))


@pytest.fixture(scope="module")
def traced(
    collector: Collector, cluster_options: Callable[..., ClusterOptions], long_model: Path
) -> Iterator[LocalCluster]:
    options = sending_to(collector, cluster_options)
    with LocalCluster(replace(options, model=str(long_model))) as running:
        yield running


def test_a_request_is_one_tree_over_three_processes(
    traced: LocalCluster, collector: Collector
) -> None:
    finish = generate(traced, 100)

    spans = collector.trace(finish.served.trace_id, is_whole)

    assert {(span.service, span.name) for span in spans} == set(REMOTE)
    for span in spans:
        missing = REMOTE[span.service, span.name] - set(span.attributes)
        assert not missing, f"{span.name} lacks {missing}"
    assert_tree(spans)
    assert {span.status for span in spans} <= {SpanStatus.OK, SpanStatus.UNSET}


def test_the_push_and_the_wait_for_it_are_linked(
    traced: LocalCluster, collector: Collector
) -> None:
    finish = generate(traced, 60)

    spans = collector.trace(finish.served.trace_id, is_whole)

    push, wait = one(spans, names.KV_PUSH), one(spans, names.KV_WAIT)
    assert wait.links == (push.span_id,)
    assert push.attributes[names.KV_BYTES] == finish.served.kv_bytes
    assert wait.attributes[names.KV_BYTES] == finish.served.kv_bytes
    assert push.attributes[names.KV_PEER] == finish.served.decode_node


def test_the_time_to_first_token_has_no_unnamed_gap(
    traced: LocalCluster, collector: Collector
) -> None:
    finishes = [generate(traced, 40 + number) for number in range(5)]

    traces = [collector.trace(finish.served.trace_id, is_whole) for finish in finishes]

    for finish, spans in zip(finishes, traces, strict=True):
        root = one(spans, names.GENERATE)
        ttft_ns = finish.first_token_s * 1e9
        named_ns = covered_ns(root, [s for s in spans if s.parent_id == root.span_id], ttft_ns)
        assert named_ns >= 0.95 * ttft_ns
        assert root.attributes[names.TIME_TO_FIRST_TOKEN] == pytest.approx(
            finish.first_token_s, abs=0.005
        )


def test_a_cancelled_request_is_cancelled_on_every_node(
    traced: LocalCluster, collector: Collector
) -> None:
    trace_id = "c" * 32
    with Client(traced.address) as client:
        stream = client.stream(prompt_of(40, seed=3), traced_by(trace_id, max_tokens=LONG_ANSWER))
        for _ in range(2):  # the first token comes while its keys and values are on their way
            next(stream)
        stream.close()

    spans = collector.trace(trace_id, has_all(names.GENERATE, names.DECODE_COMPUTE))

    for span in spans:
        if span.name in (names.GENERATE, names.DECODE, names.DECODE_COMPUTE):
            assert span.status == SpanStatus.UNSET, span.name
            assert span.attributes[names.OUTCOME] == "cancelled", span.name
    assert_tree(spans, outside="1" * 16)


def test_a_refused_request_is_one_error_with_its_reason(
    traced: LocalCluster, collector: Collector
) -> None:
    trace_id = "d" * 32
    with Client(traced.address) as client, pytest.raises(BatonError):
        client.generate((5,), traced_by(trace_id, model="other"))

    root = one(collector.trace(trace_id, has_all(names.GENERATE, names.ADMIT)), names.GENERATE)

    assert root.status == SpanStatus.ERROR
    assert root.attributes[names.ERROR_TYPE] == "UNKNOWN_MODEL"
    assert root.attributes[names.OUTCOME] == "refused"
    assert root.attributes[names.RPC_STATUS] == "NOT_FOUND"


def test_steps_of_nodes_are_traces_that_are_linked_to_their_requests(
    collector: Collector, cluster_options: Callable[..., ClusterOptions]
) -> None:
    options = sending_to(collector, cluster_options)
    every = ("--trace-step-ratio", "1")
    with LocalCluster(
        replace(options, node_arguments=(*options.node_arguments, *every))
    ) as cluster:
        finish = generate(cluster, 60)

    legs = {s.service: s for s in collector.trace(finish.served.trace_id, is_whole) if s.kind == 2}
    steps = collector.named(names.ENGINE_STEP)

    assert {step.service for step in steps} == {"baton-prefill", "baton-decode"}
    assert len({step.trace_id for step in steps}) == len(steps)
    for step in steps:
        assert step.parent_id == ""
        assert step.links == (legs[step.service].span_id,)
        assert step.linked_traces == (finish.served.trace_id,)
        parts_s = sum(step.attributes[part] for part in names.STEP_PARTS)
        assert parts_s == pytest.approx((step.ended_ns - step.began_ns) / 1e9, abs=1e-6)
    of_prefill = [step for step in steps if step.service == "baton-prefill"]
    assert sum(step.attributes[names.STEP_PREFILL_TOKENS] for step in of_prefill) == 60
    of_decode = [step for step in steps if step.service == "baton-decode"]
    assert sum(step.attributes[names.STEP_DECODE_TOKENS] for step in of_decode) == 5
    assert all(step.attributes[names.STEP_RUN] > 0 for step in steps)


def test_a_request_with_an_unsampled_traceparent_is_not_traced(
    traced: LocalCluster, collector: Collector
) -> None:
    traceparent = TRACED.format(trace_id="e" * 32, parent_id="1" * 16)[:-1] + "0"

    with Client(traced.address) as client:
        generation = Generation(greedy(4), traceparent=traceparent)
        answer = client.generate(prompt_of(8, seed=1), generation)

    assert answer.finish is not None
    assert answer.finish.served.trace_id == ""


def test_mixed_requests_have_one_root_each_and_no_orphan(
    collector: Collector, cluster_options: Callable[..., ClusterOptions]
) -> None:
    """Send requests of four kinds, and kill a decode node half way through."""
    num = NUM_MIXED
    options = sending_to(collector, cluster_options, num_prefill=2, num_decode=2)
    trace_ids = [f"{num:08x}{number:024x}" for number in range(1, num + 1)]
    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        for number, trace_id in enumerate(trace_ids):
            if number == num // 2:
                fail_over(cluster, client, trace_id)
            else:
                [remote, local, cancelled, refused][number % 4](cluster, client, trace_id, number)
        cluster.decodes = [child for child in cluster.decodes if child.process.poll() is None]

    traces = {one: collector.trace(one, has_all(names.GENERATE)) for one in trace_ids}

    for number, (trace_id, spans) in enumerate(traces.items()):
        assert [s.name for s in spans].count(names.GENERATE) == 1, trace_id
        if number != num // 2:  # the killed node took its spans with it
            assert_tree(spans, outside="1" * 16)
    moved = traces[trace_ids[num // 2]]
    migrate = one(moved, names.MIGRATE)
    first, second = sorted(legs_of(moved, names.DECODE), key=lambda leg: leg.began_ns)
    assert first.status == SpanStatus.ERROR
    assert first.attributes[names.ERROR_TYPE] == "UNAVAILABLE"
    assert first.span_id in migrate.links
    assert first.span_id in second.links
    assert second.status == SpanStatus.OK
    assert one(moved, names.GENERATE).attributes[names.SERVED] == "migrated"


def remote(cluster: LocalCluster, client: Client, trace_id: str, number: int) -> None:
    answer = client.generate(prompt_of(30, seed=100 + number), traced_by(trace_id))
    assert answer.finish is not None
    assert answer.finish.served.is_prefill_remote


def local(cluster: LocalCluster, client: Client, trace_id: str, number: int) -> None:
    """Send the next turn of a conversation, whose KV only the decode node has."""
    history = prompt_of(16, seed=100 + number)
    first = client.generate(history, Generation(greedy(17)))  # two blocks; the last token has no KV
    assert first.finish is not None
    [decode] = [one for one in cluster.decodes if one.name == first.finish.served.decode_node]
    await_reported(cluster.address, decode.address)
    history = (*history, *first.token_ids[:-1], *prompt_of(LOCAL_BELOW - 1, seed=number))
    answer = client.generate(history, traced_by(trace_id))
    assert answer.finish is not None
    assert not answer.finish.served.is_prefill_remote


def cancelled(cluster: LocalCluster, client: Client, trace_id: str, number: int) -> None:
    stream = client.stream(prompt_of(30, seed=number), traced_by(trace_id, max_tokens=400))
    next(stream)
    stream.close()


def refused(cluster: LocalCluster, client: Client, trace_id: str, number: int) -> None:
    with pytest.raises(BatonError):
        client.generate((5,) * 600, traced_by(trace_id))


def fail_over(cluster: LocalCluster, client: Client, trace_id: str) -> None:
    """Kill the decode node of a running answer, whose first token came from prefill."""
    with suspended(*cluster.decodes):
        stream = client.stream(prompt_of(30, seed=9), traced_by(trace_id, max_tokens=300))
        next(stream)
        kill_the_writer(cluster)
    for _ in stream:
        pass


LOCAL_BELOW = 8
LONG_CONTEXT = 4096  # fits into the KV cache of a node
LONG_ANSWER = 4000
NUM_MIXED = 24  # a fourth of each kind


def sending_to(
    collector: Collector,
    cluster_options: Callable[..., ClusterOptions],
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
) -> ClusterOptions:
    otlp = ("--otlp-endpoint", collector.address)
    options = cluster_options(
        num_prefill=num_prefill,
        num_decode=num_decode,
        router_arguments=(*otlp, "--local-prefill-below", str(LOCAL_BELOW), "--no-kv-pulls"),
    )
    return replace(options, node_arguments=(*options.node_arguments, *otlp))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def generate(cluster: LocalCluster, num_tokens: int) -> Finish:
    with Client(cluster.address, timeout_s=60) as client:
        answer = client.generate(prompt_of(num_tokens, seed=num_tokens), Generation(greedy(6)))
    assert answer.finish is not None
    return answer.finish


def traced_by(trace_id: str, *, max_tokens: int = 6, model: str = "") -> Generation:
    traceparent = TRACED.format(trace_id=trace_id, parent_id="1" * 16)
    return Generation(greedy(max_tokens), model=model, traceparent=traceparent)


def one(spans: list[Collected], name: str) -> Collected:
    [found] = [span for span in spans if span.name == name]
    return found


def legs_of(spans: list[Collected], name: str) -> list[Collected]:
    return [span for span in spans if span.name == name and span.service == "baton-router"]


def has_all(*wanted: str) -> Callable[[list[Collected]], bool]:
    return lambda spans: set(wanted) <= {span.name for span in spans}


def is_whole(spans: list[Collected]) -> bool:
    return {(span.service, span.name) for span in spans} >= set(REMOTE)


def assert_tree(spans: list[Collected], outside: str = "") -> None:
    """Check that the spans form one tree."""
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans)
    assert [span.name for span in spans if span.parent_id == outside] == [names.GENERATE]
    orphans = [span.name for span in spans if span.parent_id not in {outside, *ids}]
    assert not orphans


def covered_ns(root: Collected, children: list[Collected], until_ns: float) -> float:
    """Return the part of the root's first `until_ns` nanoseconds that child spans cover."""
    total, reached = 0.0, 0.0
    for child in sorted(children, key=lambda span: span.began_ns):
        began = max(reached, child.began_ns - root.began_ns)
        ended = min(until_ns, child.ended_ns - root.began_ns)
        total += max(0.0, ended - began)
        reached = max(reached, ended)
    return total
