"""KV of adapters on real nodes: hand-offs, pulls, tiers, preemptions, speculation and grammars.

Each answer must be that of the adapter alone, and KV of one adapter must serve no other one.
"""

from __future__ import annotations

import itertools
import re
import shutil
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.checkpoint.peft_folder import PeftFolder
from baton.core.ids import NO_ADAPTER, AdapterRef
from baton.core.legs import LegKind
from baton.core.structured_outputs import StructuredOutputs
from baton.llm import LLM
from baton.node.adapters.config import AdapterConfig
from baton.node.kv.tiers_config import TiersConfig
from tests.support.adapters import merge, write_adapter
from tests.support.engine_nodes import EngineNode
from tests.support.engine_pair import Answered, Pair, PairOptions, greedy, source_of
from tests.support.llm_d_metrics import extract
from tests.support.models import prompt_of
from tests.support.ports import free_port
from tests.support.waits import await_value

BLOCK_SIZE = 16
NUM_TOKENS = 24
NUM_PROMPT = 100
NUM_WHOLE = NUM_PROMPT // BLOCK_SIZE * BLOCK_SIZE
NAMES = ("", "one", "two")
SMALL_CACHE = 256 << 10  # 32 blocks

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Models:
    """Adapters below a folder, and models into which they are merged."""

    root: Path
    merged: Mapping[str, LLM]  # by name of the adapter; the base without one

    def ref(self, name: str) -> AdapterRef:
        if not name:
            return NO_ADAPTER
        return AdapterRef(name, PeftFolder(self.root / name).digest(), name)

    def tokens(self, name: str, prompt: Sequence[int], count: int = NUM_TOKENS) -> list[int]:
        [completion] = self.merged[name].generate(list(prompt), greedy(count))
        return completion.token_ids


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, local: LLM
) -> Iterator[Models]:
    root, merged = tmp_path_factory.mktemp("adapters"), tmp_path_factory.mktemp("merged")
    engines = {"": local}
    for seed, name in enumerate(NAMES[1:]):
        folder = merge(
            model_folder, write_adapter(model_folder, root / name, seed=seed), merged / name
        )
        engines[name] = LLM(str(folder), kv_cache_memory="4MiB", num_threads=1, show_progress=False)
    yield Models(root, engines)
    for name in NAMES[1:]:
        engines[name].close()


@pytest.fixture(scope="module")
def options(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, models: Models
) -> PairOptions:
    folder = tmp_path_factory.mktemp("tiers")
    return PairOptions(
        model_folder,
        prefill_bytes=SMALL_CACHE,
        decode_bytes=SMALL_CACHE,
        adapters=AdapterConfig(root=models.root, max_loras=2, max_cpu_loras=2),
        tiers=TiersConfig(host_bytes=1 << 20, folder=str(folder)),
        speculative="ngram:4:fixed",
        metrics_port=free_port(),
    )


@pytest.fixture(scope="module")
def pair(options: PairOptions) -> Iterator[Pair]:
    with Pair(options) as running:
        yield running


@pytest.fixture(scope="module")
def other(options: PairOptions) -> Iterator[EngineNode]:
    """Run another prefill node, without tiers."""
    config = replace(options, tiers=TiersConfig(host_bytes=0), prefill_bytes=8 << 20).of(
        LegKind.PREFILL
    )
    node = EngineNode(LegKind.PREFILL, replace(config, node_id="prefill-2"))
    try:
        yield node.await_ready()
    finally:
        code = node.end()
    assert code == 0


@pytest.fixture(autouse=True)
def _nothing_leaks(pair: Pair) -> Iterator[None]:
    yield
    pair.await_all_free()


def loaded(answer: Answered) -> dict[str, int]:
    """Return the prompt tokens whose KV the prefill node loaded, by source."""
    return dict(answer.prefill.summary.prompt_tokens_loaded)


def fill_caches(pair: Pair, seeds: Iterator[int]) -> None:
    """Evict all KV from the KV cache of the prefill node."""
    for _ in range(6):
        pair.answer(prompt_of(NUM_PROMPT, seed=next(seeds)), greedy(2))


def test_a_pull_brings_the_answer_that_a_decode_node_wrote_with_the_adapter(
    pair: Pair, other: EngineNode, models: Models
) -> None:
    prompt = prompt_of(NUM_PROMPT, seed=801)
    first = pair.answer(prompt, greedy(NUM_TOKENS), models.ref("two"))
    turn = (*prompt, *first.token_ids, *prompt_of(40, seed=802))
    num_known = (NUM_PROMPT + NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    source = source_of(pair.d, num_known)
    pulled = {}

    for name in reversed(NAMES):
        answer = pair.answer_by(other, turn, greedy(NUM_TOKENS), source, models.ref(name))
        assert answer.token_ids == models.tokens(name, turn)
        pulled[name] = loaded(answer)

    assert pulled == {"two": {"peer": num_known}, "one": {}, "": {}}


def test_evicted_kv_is_loaded_from_host_memory_for_its_adapter_only(
    pair: Pair, models: Models
) -> None:
    prompt, seeds = prompt_of(NUM_PROMPT, seed=803), itertools.count(900)
    found = {}
    pair.answer(prompt, greedy(2), models.ref("one"))
    fill_caches(pair, seeds)

    for name in ("two", "", "one"):
        answer = pair.answer(prompt, greedy(NUM_TOKENS), models.ref(name))
        assert answer.token_ids == models.tokens(name, prompt)
        found[name] = loaded(answer)

    assert found == {"two": {}, "": {}, "one": {"host": NUM_WHOLE}}


def test_a_restarted_node_loads_files_of_the_same_weights_only(
    pair: Pair, models: Models, model_folder: Path
) -> None:
    """An adapter is replaced under its name and path while the node is down."""
    prompt, live = prompt_of(NUM_PROMPT, seed=804), models.root / "live"
    shutil.copytree(models.root / "one", live)
    old = models.ref("live")
    assert pair.answer(prompt, greedy(NUM_TOKENS), old).token_ids == models.tokens("one", prompt)
    pair.await_all_free()
    pair.p.terminate()
    assert pair.p.exit_code(30.0) == 0
    shutil.copytree(models.root / "two", live, dirs_exist_ok=True)
    pair.p.start()
    pair.p.await_ready()
    found = {}

    for name, adapter in (
        ("two", models.ref("live")),
        ("", NO_ADAPTER),
        ("one", models.ref("one")),
    ):
        answer = pair.answer(prompt, greedy(NUM_TOKENS), adapter)
        assert answer.token_ids == models.tokens(name, prompt)
        found[name] = loaded(answer)

    assert found == {"two": {}, "": {}, "one": {"file": NUM_WHOLE}}


def test_preempted_and_speculated_answers_are_those_of_their_adapter(
    pair: Pair, options: PairOptions, models: Models
) -> None:
    prompts = [prompt_of(60, seed=805), (5, 6, 7) * 20, prompt_of(30, seed=806) * 2]
    asked = [(prompt, name) for prompt in prompts for name in NAMES]
    before = num_preemptions(options)

    def answer_all() -> list[Answered]:
        with ThreadPoolExecutor(len(asked)) as threads:
            return list(
                threads.map(
                    lambda each: pair.answer(each[0], greedy(60), models.ref(each[1])), asked
                )
            )

    # On a busy machine, too few of them may run at once to fill the KV cache.
    answers = await_value(answer_all, lambda _: num_preemptions(options) > before)

    for (prompt, name), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == models.tokens(name, prompt, 60)
    assert sum(answer.decode.summary.tokens_accepted for answer in answers) > 0


def test_answers_with_a_grammar_are_those_of_their_adapter(pair: Pair, models: Models) -> None:
    regex = r"[a-z]{3}( [a-z]{3}){2,20}"
    sampling = greedy(60, ignore_eos=False, structured_outputs=StructuredOutputs(regex=regex))
    prompt = prompt_of(NUM_PROMPT, seed=807)
    texts = set()

    for name in NAMES:
        answer = pair.answer(prompt, sampling, models.ref(name))
        [expected] = models.merged[name].generate([prompt], sampling)
        assert answer.was_handed_over
        assert answer.token_ids == expected.token_ids
        texts.add(expected.text)

    assert len(texts) == len(NAMES)


def test_schedulers_see_the_adapters_in_use(
    pair: Pair, options: PairOptions, models: Models
) -> None:
    """As llm-d reads them from the decode node: those that have a name there and requests now."""
    sql = pair.load_adapter(pair.d, "sql", "one")
    idle = extract(metrics_page(options))
    calls = [
        pair.decode(pair.new_id(), prompt_of(20), greedy(400), is_local=True, adapter=adapter)
        for adapter in (sql, models.ref("two"), NO_ADAPTER)
    ]
    for call in calls:
        call.until_tokens(1)
    busy = extract(metrics_page(options))
    for call in calls:
        call.disconnect()
    pair.unload_adapter(pair.d, "sql")

    assert (idle.max_active_models, idle.active_models) == (2, frozenset())
    assert (busy.max_active_models, busy.active_models) == (2, frozenset({"sql"}))
    assert busy.running_requests_size + busy.waiting_queue_size == 3


def num_preemptions(options: PairOptions) -> float:
    found = re.findall(
        r"^baton_preemptions_total\{?.*\s(\S+)$", metrics_page(options), re.MULTILINE
    )
    return sum(map(float, found))


def metrics_page(options: PairOptions) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{options.metrics_port}/metrics") as page:
        return str(page.read(), "utf-8")
