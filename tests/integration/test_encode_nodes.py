"""Encode nodes: pictures are encoded apart from the prompts that have them, in a real cluster."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("PIL", reason="baton[images] is not installed")

from baton.cluster import ClusterOptions, LocalCluster
from tests.integration.test_images import (
    AS_BATON,
    FOX,
    NUM_TOKENS,
    OWL,
    answer_of,
    asked,
    connected_to,
    expected,
)
from tests.support.collector import Collected, Collector, collecting
from tests.support.image_files import file_of, random_image
from tests.support.nodes import await_reported
from tests.support.ports import free_port
from tests.support.vision import make_chat_folder

HEN, YAK = (file_of(random_image(80, 60, seed=seed)) for seed in (3, 4))
ENCODED = re.compile(r'^baton_pictures_total\{.*kind="(\w+)".*\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_folder(tmp_path_factory.mktemp("models") / "eyes")


class MetricsPorts(NamedTuple):
    prefill: int
    encode: int


@pytest.fixture(scope="module")
def ports() -> MetricsPorts:
    return MetricsPorts(free_port(), free_port())


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(
    folder: Path,
    ports: MetricsPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LocalCluster]:
    otlp = "--otlp-endpoint", collector.address
    files = "--kv-host-memory", "8MiB", "--kv-folder", str(tmp_path_factory.mktemp("kv"))
    options = ClusterOptions(
        str(folder),
        num_encode=1,
        node_arguments=("--kv-cache-memory", "8MiB", "--threads", "1", *otlp),
        prefill_arguments=("--metrics-port", str(ports.prefill)),
        encode_arguments=("--metrics-port", str(ports.encode), *files),
        router_arguments=("--http-port", "0", *otlp),
    )
    with LocalCluster(options) as running:
        await_reported(running.address, running.encoders[0].address)
        yield running
    ended_well = [child for child in running.children if child not in running.encoders]
    assert {child.process.returncode for child in ended_well} == {0}


@pytest.fixture
def chats(cluster: LocalCluster) -> Iterator[Any]:
    with connected_to(cluster) as connected:
        yield connected


def pictures_of(port: int) -> dict[str, int]:
    """Return the pictures that a node has encoded, found in memory and read from blocks."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return {kind: int(float(count)) for kind, count in ENCODED.findall(page.read().decode())}


@pytest.mark.parametrize("parts", [(FOX, "who?"), (FOX, "or", OWL), (OWL, FOX), (FOX, FOX)])
def test_answers_are_those_of_transformers(
    parts: tuple[bytes | str, ...], chats: Any, folder: Path, ports: MetricsPorts
) -> None:
    first, again = answer_of(chats, *parts), answer_of(chats, *parts)

    assert first.choices[0].message.content == expected(folder, parts)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert not pictures_of(ports.prefill)["encoded"]


def test_a_picture_of_many_requests_is_encoded_once_in_the_cluster(
    chats: Any, ports: MetricsPorts
) -> None:
    before = pictures_of(ports.encode)["encoded"]
    answer_of(chats, HEN, "question 0")
    once = pictures_of(ports.encode)["encoded"]
    for number in range(1, 20):
        answer_of(chats, HEN, f"question {number}")

    assert before < once == pictures_of(ports.encode)["encoded"]
    assert not pictures_of(ports.prefill)["encoded"]


def test_traces_name_the_legs_of_a_picture_after_what_they_do(
    chats: Any, collector: Collector
) -> None:
    def is_whole(spans: Sequence[Collected]) -> bool:
        return {"generate", "prefetch_wait", "encode_compute"} <= {span.name for span in spans}

    new, trace = file_of(random_image(60, 60, seed=6)), f"{0xC:032x}"
    chats.chat.completions.create(
        model="",
        messages=asked(new, "who?"),
        max_tokens=NUM_TOKENS,
        extra_headers={"traceparent": f"00-{trace}-{1:016x}-01"},
    )

    spans = collector.trace(trace, is_whole)
    name_by_id = {
        span.span_id: f"{span.service.removeprefix('baton-')}/{span.name}" for span in spans
    }
    below = {(name_by_id.get(span.parent_id), name_by_id[span.span_id]) for span in spans}
    assert below >= {
        ("router/generate", "router/encode"),
        ("router/encode", "encode/encode"),
        ("encode/encode", "encode/encode_wait"),
        ("encode/encode", "encode/encode_compute"),
        ("encode/encode_compute", "encode/encode_pictures"),
        ("router/generate", "router/prefetch"),
        ("router/prefetch", "prefill/prefetch"),
        ("prefill/prefetch", "prefill/prefetch_wait"),
    }
    assert Counter(name_by_id.values())["router/prefill"] == 1


@pytest.mark.parametrize("parts", [(YAK, "who?"), ("who?", YAK)])
def test_all_answers_to_a_prompt_see_its_image(
    parts: tuple[bytes | str, ...], chats: Any, folder: Path
) -> None:
    answers = chats.chat.completions.create(
        model="",
        messages=asked(*parts),
        max_tokens=NUM_TOKENS,
        temperature=0,
        n=3,
        extra_body=AS_BATON,
    )

    assert {each.message.content for each in answers.choices} == {expected(folder, parts)}


def test_an_encode_node_that_has_restarted_reads_its_encodings_from_files(
    chats: Any, cluster: LocalCluster, folder: Path, ports: MetricsPorts
) -> None:
    answer_of(chats, FOX, "who?")
    for node in (cluster.encoders[0], cluster.prefills[0]):
        node.request_stop()
        node.process.wait()
        await_reported(cluster.address, cluster.restart(node).address)

    answer = answer_of(chats, "and who is it?", FOX)  # no prefix of it is cached

    assert answer.choices[0].message.content == expected(folder, ("and who is it?", FOX))
    assert not pictures_of(ports.encode)["encoded"]
    assert pictures_of(ports.prefill)["read"]


def test_the_prefill_node_encodes_when_the_encode_node_is_lost(
    chats: Any, cluster: LocalCluster, folder: Path, ports: MetricsPorts
) -> None:
    cluster.encoders[0].process.kill()
    new = file_of(random_image(70, 90, seed=5))

    answer = answer_of(chats, new, "who?")

    assert answer.choices[0].message.content == expected(folder, (new, "who?"))
    assert pictures_of(ports.prefill)["encoded"]
