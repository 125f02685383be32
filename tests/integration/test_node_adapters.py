"""Adapters on a prefill and a decode node: tokens, loads and unloads while requests run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from baton.checkpoint.peft_folder import PeftFolder
from baton.core.ids import NO_ADAPTER, AdapterRef
from baton.core.request import EMBED
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from baton.node.adapters.config import AdapterConfig, AdapterFolder
from baton.rpc.adapters import LoadedAdapter
from baton.rpc.status import remote_error
from baton.v1 import node_pb2, node_pb2_grpc
from benchmarks.chaos.hostile.bad_adapters import write_bad_adapters
from tests.support.adapters import merge, write_adapter
from tests.support.engine_nodes import EngineNode
from tests.support.engine_pair import Pair, PairOptions, greedy
from tests.support.models import prompt_of
from tests.support.nodes import adapters_at, card_at
from tests.support.waits import await_value

NUM_TOKENS = 12
PROMPT = prompt_of(87, seed=700)
NUM_WHOLE = 80  # of its tokens, in whole blocks
NAMES = ("one", "two", "three", "four", "five")
PATIENCE_S = 30.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(model_folder, root / name, seed=seed)
    write_adapter(model_folder, root / "copy of one", seed=0)
    write_bad_adapters(root / "one", root)
    return root


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def pair(request: pytest.FixtureRequest, model_folder: Path, root: Path) -> Iterator[Pair]:
    adapters = AdapterConfig(
        adapters=(AdapterFolder("one", root / "one"),), root=root, max_loras=1, max_cpu_loras=2
    )
    options = PairOptions(
        model_folder, adapters=adapters, async_scheduling=request.param, pooling="mean"
    )
    with Pair(options) as running:
        yield running


@pytest.fixture(scope="module")
def answers(model_folder: Path, root: Path) -> dict[str, list[int]]:
    folders = {name: str(root / name) for name in NAMES}
    with LLM(
        str(model_folder), kv_cache_memory="4MiB", num_threads=1, show_progress=False, lora=folders
    ) as llm:
        return {
            name: llm.generate(PROMPT, greedy(NUM_TOKENS), lora=name)[0].token_ids
            for name in ("", *NAMES)
        }


def ref_of(root: Path, path: str, name: str = "") -> AdapterRef:
    """Return the adapter in a folder, as a router that has never asked these nodes knows it."""
    return AdapterRef(name or path, PeftFolder(root / path).digest(), path)


def load_on_both(pair: Pair, name: str, path: str) -> AdapterRef:
    refs = {pair.load_adapter(node, name, path) for node in (pair.p, pair.d)}
    [ref] = refs
    return ref


def named_on(node: EngineNode) -> set[str]:
    return {adapter.name for adapter in adapters_at(node.address).named}


def in_memory_of(node: EngineNode) -> dict[str, LoadedAdapter]:
    """Return the adapters in memory by path."""
    return {each.path: each for each in adapters_at(node.address).in_memory}


def await_adapters(node: EngineNode, is_wanted: Callable[[dict[str, LoadedAdapter]], bool]) -> None:
    await_value(lambda: in_memory_of(node), is_wanted)


def test_handed_over_tokens_equal_those_of_one_engine(
    pair: Pair, root: Path, answers: dict[str, list[int]]
) -> None:
    answer = pair.answer(PROMPT, greedy(NUM_TOKENS), ref_of(root, "one"))

    assert answer.was_handed_over
    assert answer.token_ids == answers["one"]
    assert pair.answer(PROMPT, greedy(NUM_TOKENS)).token_ids == answers[""]
    assert len(set(map(tuple, answers.values()))) == len(answers)
    assert card_at(pair.p.address).max_loras == 1
    pair.await_all_free()


def test_nodes_read_adapters_that_only_requests_name(
    pair: Pair, root: Path, answers: dict[str, list[int]]
) -> None:
    answer = pair.answer(PROMPT, greedy(NUM_TOKENS), ref_of(root, "two"))

    assert answer.token_ids == answers["two"]
    for node in (pair.p, pair.d):
        assert "two" not in named_on(node)
        assert in_memory_of(node)["two"].num_bytes > 0


def test_many_requests_share_a_place_in_the_batch_and_two_in_memory(
    pair: Pair, root: Path, answers: dict[str, list[int]]
) -> None:
    refs = [NO_ADAPTER, *(ref_of(root, name) for name in NAMES)] * 3

    with ThreadPoolExecutor(len(refs)) as threads:
        outcomes = list(
            threads.map(lambda ref: pair.answer(PROMPT, greedy(NUM_TOKENS), ref).token_ids, refs)
        )

    assert outcomes == [answers[ref.name] for ref in refs]
    pair.await_all_free()
    for node in (pair.p, pair.d):
        assert [each.num_requests for each in in_memory_of(node).values()] == [0, 0]


def test_equal_adapters_share_kv_whatever_their_names_are(pair: Pair, root: Path) -> None:
    pair.answer(PROMPT, greedy(NUM_TOKENS), ref_of(root, "one"))
    alias = load_on_both(pair, "alias", "copy of one")

    answer = pair.answer(PROMPT, greedy(NUM_TOKENS), alias)

    assert alias.id == ref_of(root, "one").id
    assert answer.decode.summary.prompt_tokens_cached == NUM_WHOLE
    for node in (pair.p, pair.d):
        pair.unload_adapter(node, "alias")


def test_other_weights_under_the_same_name_never_use_the_old_kv(
    pair: Pair, root: Path, answers: dict[str, list[int]]
) -> None:
    prompt = prompt_of(87, seed=701)
    old = load_on_both(pair, "tenant", "three")
    first = pair.answer(prompt, greedy(NUM_TOKENS), old)
    new = load_on_both(pair, "tenant", "four")

    second = pair.answer(prompt, greedy(NUM_TOKENS), new)

    assert second.decode.summary.prompt_tokens_cached == 0
    assert second.token_ids != first.token_ids
    assert pair.answer(PROMPT, greedy(NUM_TOKENS), new).token_ids == answers["four"]
    for node in (pair.p, pair.d):
        pair.unload_adapter(node, "tenant")


def test_requests_keep_an_adapter_that_is_unloaded(
    pair: Pair, root: Path, answers: dict[str, list[int]]
) -> None:
    adapter = load_on_both(pair, "going", "five")
    prefill, decode = pair.start(PROMPT, greedy(400), adapter)
    decode.until_tokens(2)
    for node in (pair.p, pair.d):
        pair.unload_adapter(node, "going")
        assert "going" not in named_on(node)
    assert decode.to_its_end().token_ids[:NUM_TOKENS] == answers["five"]
    assert len(decode.token_ids) == 400
    prefill.to_its_end()

    for node in (pair.p, pair.d):
        await_adapters(node, lambda found: "five" not in found)


def test_files_that_have_changed_are_refused(pair: Pair, root: Path, model_folder: Path) -> None:
    write_adapter(model_folder, root / "changing", seed=20)
    old = ref_of(root, "changing")
    write_adapter(model_folder, root / "changing", seed=21)

    call = pair.decode(pair.new_id(), PROMPT, greedy(4), is_local=True, adapter=old).to_its_end()

    assert call.failure is not None
    assert call.failure.reason == "ADAPTER_UNREADABLE"
    assert "load the adapter again" in call.failure.message
    pair.await_all_free()


def test_embeddings_use_adapters(
    pair: Pair, root: Path, model_folder: Path, tmp_path: Path
) -> None:
    merged = merge(model_folder, root / "one", tmp_path / "merged")
    with LLM(
        str(merged), kv_cache_memory="4MiB", num_threads=1, show_progress=False, pooling="mean"
    ) as llm:
        [expected] = llm.embed([PROMPT])
    params = SamplingParams(max_tokens=1)

    found, plain = (
        np.frombuffer(
            pair.prefill(pair.new_id(), PROMPT, params, adapter=adapter, task=EMBED)
            .to_its_end()
            .vector,
            dtype="<f4",
        )
        for adapter in (ref_of(root, "one"), NO_ADAPTER)
    )

    assert np.abs(found - np.asarray(expected)).max() < 1e-5
    assert np.abs(plain - np.asarray(expected)).max() > 1e-3


def test_only_operators_change_adapters(pair: Pair) -> None:
    with grpc.insecure_channel(pair.p.address) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        with pytest.raises(grpc.RpcError) as load:
            stub.ReadAdapter(node_pb2.ReadAdapterRequest(name="a", path="one"))
        with pytest.raises(grpc.RpcError) as unload:
            stub.SetAdapterNames(node_pb2.SetAdapterNamesRequest())

    for refused in (load, unload):
        assert remote_error(refused.value).reason == "NOT_AN_OPERATOR"


def test_hostile_adapters_are_refused_while_others_are_served(pair: Pair, root: Path) -> None:
    hostile = {
        "bad/nan": "not finite",
        "bad/other-shapes": "4 x 4",
        "bad/other-modules": "not a linear layer",
        "bad/no-tensors": "no matrices",
        "bad/endless-pattern": "match fast",
        "bad/many-patterns": "match fast",
        "bad/infinite-scale": "alpha_pattern",
        "bad/huge-scale": "lower lora_alpha",
        "bad/huge-rank": "max_lora_rank is",
        "bad/huge-weights": "max_lora_rank is",
        "bad/huge-header": "max_lora_rank is",
        "bad/huge-json": "more than",
        "bad/nested-json": "nested too deeply",
        "bad/cut-weights": "cannot be read",
        "bad/garbage-weights": "cannot be read",
        "bad/pipe": "no file",
        "bad/link-out": "leads out",
        "bad/weights-link-out": "leads out",
        "bad/link-loop": "loop",
        "bad/empty": "no file",
        "../one": "--lora-root",
        "/etc": "--lora-root",
        str(root / "one"): "--lora-root",
        "missing": "no file",
    }
    _, bystander = pair.start(prompt_of(40, seed=702), greedy(400))
    bystander.until_tokens(1)

    for path, expected in hostile.items():
        num_tokens = len(bystander.token_ids)
        with pytest.raises(grpc.RpcError) as refused:
            pair.load_adapter(pair.d, "hostile", path)
        error = remote_error(refused.value)
        assert error.reason == "INVALID_REQUEST", (path, error)
        assert expected in error.message, (path, error.message)
        bystander.until_tokens(min(400, num_tokens + 1))
    with pytest.raises(grpc.RpcError) as unnamed:
        pair.load_adapter(pair.d, "x" * 300, "one")

    assert remote_error(unnamed.value).reason == "INVALID_REQUEST"
    assert "hostile" not in named_on(pair.d)
    assert len(bystander.to_its_end().token_ids) == 400
    pair.await_all_free()
