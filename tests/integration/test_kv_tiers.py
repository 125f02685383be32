"""Real clusters whose nodes keep KV in host memory, files, objects and installed connectors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from baton.client import Answer, Client, Finish, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from benchmarks.chaos.s3_server import BUCKET, s3_server
from tests.support.doc_examples import installed_at, write_example, write_package
from tests.support.families import FAMILY_VARIANTS
from tests.support.models import make_model_folder, prompt_of, reference_choices
from tests.support.s3_environment import point_environment_at
from tests.support.small_disk import Seen, prompts

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
BLOCK_SIZE = 16
FIRST = prompt_of(100, seed=71)
BROKEN = """
from {module} import Shelf

class Broken(Shelf):
    def holds(self, name):
        raise RuntimeError("broken")

    start = poll = clear = load_s = holds
"""
NO_LOCAL_PREFILL = ("--local-prefill-below", "0")


@pytest.fixture(params=["file", "object"])
def shared_tier(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The name of a tier that nodes share, and the options for it."""
    if request.param == "file":
        yield "file", ("--kv-host-memory", "4MiB", "--kv-folder", str(tmp_path))
        return
    with s3_server() as server:
        point_environment_at(server, monkeypatch)
        yield "object", ("--kv-host-memory", "4MiB", "--kv-object-store", f"s3://{BUCKET}/kv")


def test_answers_of_decode_nodes_are_loaded_by_prefill_nodes_after_a_restart(
    cluster_options: Callable[..., ClusterOptions],
    local: LLM,
    shared_tier: tuple[str, tuple[str, ...]],
) -> None:
    tier, tiers = shared_tier
    options = replace(
        cluster_options(router_arguments=NO_LOCAL_PREFILL),
        prefill_arguments=tiers,
        decode_arguments=tiers,
    )
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        first = client.generate(FIRST, Generation(SAMPLING))
    turn = [*FIRST, *first.token_ids, *prompt_of(40, seed=72)]

    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        second = client.generate(turn, Generation(SAMPLING))

    assert first.token_ids == expected(local, FIRST)
    assert second.token_ids == expected(local, turn)
    served = finish_of(second).served
    assert served.is_prefill_remote
    # The KV of the last token of an answer is not computed.
    num_known = (len(FIRST) + len(first.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert served.prompt_tokens_loaded == {tier: num_known}
    assert served.prompt_tokens_cached_on_prefill == num_known


def test_damaged_files_are_never_loaded(
    cluster_options: Callable[..., ClusterOptions], local: LLM, tmp_path: Path
) -> None:
    tiers = ("--kv-host-memory", "4MiB", "--kv-folder", str(tmp_path))
    options = replace(cluster_options(), prefill_arguments=tiers)
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        client.generate(FIRST, Generation(SAMPLING))
    paths = sorted(tmp_path.glob("*/??/*.kv"))
    assert len(paths) == len(FIRST) // BLOCK_SIZE
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        again = client.generate(FIRST, Generation(SAMPLING))

    assert again.token_ids == expected(local, FIRST)
    assert finish_of(again).served.prompt_tokens_loaded == {}


def test_a_cluster_starts_and_answers_without_its_folder(
    cluster_options: Callable[..., ClusterOptions], local: LLM, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    tiers = ("--kv-host-memory", "4MiB", "--kv-folder", str(tmp_path / "file" / "kv"))
    options = replace(cluster_options(), prefill_arguments=tiers, decode_arguments=tiers)
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        answer = client.generate(FIRST, Generation(SAMPLING))

    assert answer.token_ids == expected(local, FIRST)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "memory"),
    [
        (None, "auto", "256KiB"),
        (None, "fp8", "64KiB"),
        ("gemma3", "auto", "256KiB"),
        ("qwen3-next", "auto", "256KiB"),
    ],
)
def test_evicted_prefixes_are_loaded_from_host_memory(
    cluster_options: Callable[..., ClusterOptions],
    local: LLM,
    tmp_path: Path,
    family: str | None,
    kv_cache_dtype: str,
    memory: str,
) -> None:
    options = cluster_options(router_arguments=NO_LOCAL_PREFILL)
    if family is not None:
        folder = make_model_folder(tmp_path, FAMILY_VARIANTS[family])
        options = replace(options, model=str(folder))
    if family is not None or kv_cache_dtype != "auto":
        local = LLM(options.model, kv_cache_memory="4MiB", kv_cache_dtype=kv_cache_dtype)
    dtype = ("--kv-cache-dtype", kv_cache_dtype)
    options = replace(
        options,
        prefill_arguments=("--kv-cache-memory", memory, "--kv-host-memory", "8MiB", *dtype),
        decode_arguments=dtype,
    )
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        answers = [client.generate(FIRST, Generation(SAMPLING))]
        for seed in range(80, 88):  # more than the KV cache of the prefill node holds
            client.generate(prompt_of(100, seed=seed), Generation(SHORT))
        answers.append(client.generate(FIRST, Generation(SAMPLING)))

    assert [answer.token_ids for answer in answers] == [expected(local, FIRST)] * 2
    # With recurrent layers: up to the snapshot at the last whole block of the prompt.
    loaded = finish_of(answers[1]).served.prompt_tokens_loaded
    assert loaded == {"host": len(FIRST) // BLOCK_SIZE * BLOCK_SIZE}


def test_an_installed_connector_serves_loads_and_a_broken_one_only_loses_its_hits(
    cluster_options: Callable[..., ClusterOptions], local: LLM, tmp_path: Path
) -> None:
    module = write_example("kv-connectors.md", tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN.format(module=module))
    entry_points = {"shelf": f"{module}:Shelf", "broken": "broken:Broken"}
    write_package(tmp_path, "baton.kv_connectors", entry_points)
    options = replace(
        cluster_options(router_arguments=NO_LOCAL_PREFILL),
        prefill_arguments=(
            *("--kv-cache-memory", "256KiB", "--kv-connector", "shelf"),
            *("--kv-connector-config", '{"max_blocks": 500}'),
        ),
        decode_arguments=("--kv-cache-memory", "256KiB", "--kv-connector", "broken"),
        environment=installed_at(tmp_path),
    )
    prompts = [FIRST, *(prompt_of(100, seed=seed) for seed in range(80, 90)), FIRST]
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        answers = [client.generate(prompt, Generation(SAMPLING)) for prompt in prompts]

    assert [answer.token_ids for answer in answers] == [
        expected(local, prompt) for prompt in prompts
    ]
    loaded = finish_of(answers[-1]).served.prompt_tokens_loaded
    assert loaded == {"shelf": len(FIRST) // BLOCK_SIZE * BLOCK_SIZE}


def test_retained_kv_is_evicted_last_and_released_kv_first(
    cluster_options: Callable[..., ClusterOptions],
) -> None:
    """The KV cache of the prefill node has 32 blocks, its host memory 64, and a prompt 6."""
    options = replace(
        cluster_options(router_arguments=(*NO_LOCAL_PREFILL, "--no-kv-pulls")),
        prefill_arguments=("--kv-cache-memory", "256KiB", "--kv-host-memory", "512KiB"),
    )
    plain, released = prompt_of(100, seed=73), prompt_of(100, seed=74)
    seeds = iter(range(200, 300))
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:

        def loaded(prompt: Sequence[int], hints: KvHints = NO_KV_HINTS) -> int:
            answer = client.generate(prompt, Generation(SHORT, kv_hints=hints))
            return finish_of(answer).served.prompt_tokens_loaded.get("host", 0)

        def press(num_prompts: int) -> None:
            for _ in range(num_prompts):
                loaded(prompt_of(100, seed=next(seeds)))

        loaded(FIRST, KvHints(session_id="kept", retain_s=3600.0))
        loaded(plain)
        loaded(released)
        loaded(released, KvHints(release=True))
        press(8)
        assert loaded(plain) == 96
        assert loaded(released) < 96
        press(20)
        prefetched = client.generate(FIRST, Generation(SHORT, kv_hints=KvHints(prefetch=True)))
        again = client.generate(FIRST, Generation(SHORT))
        assert loaded(plain) == 0

    assert not prefetched.token_ids
    assert finish_of(prefetched).reason == "length"
    assert finish_of(prefetched).served.prompt_tokens_loaded == {"host": 96}
    assert finish_of(again).served.prompt_tokens_loaded == {}
    assert finish_of(again).served.prompt_tokens_cached_on_prefill == 96


def expected(local: LLM, prompt: Sequence[int]) -> list[int]:
    return local.generate(list(prompt), SAMPLING)[0].token_ids


def finish_of(answer: Answer) -> Finish:
    assert answer.finish is not None
    return answer.finish


def test_a_full_disk_evicts_and_a_read_only_one_fails_no_answer(
    model_folder: Path, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "tests.support.small_disk", str(model_folder), str(tmp_path)]
    run = partial(subprocess.run, capture_output=True, text=True)
    if run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)]).returncode:
        pytest.skip("mount namespaces are not permitted here")

    ended = run(["unshare", "-rm", *program])

    assert ended.returncode == 0, ended.stderr
    full, read_only = (Seen(**seen) for seen in json.loads(ended.stdout))
    for prompt, answer in zip(prompts(), full.answers, strict=True):
        assert answer == reference_choices(model_folder, prompt, answer, len(answer))
    assert read_only.answers == full.answers
    assert not full.num_warnings
    assert read_only.num_warnings
    assert read_only.num_loaded_tokens  # what was stored last
