"""Adapters on a prefill and a decode node: tokens, loads and unloads while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.ids import AdapterRef
from baton.llm import LLM
from baton.node.adapters.config import AdapterConfig, AdapterFolder
from tests.support.adapters import write_adapter
from tests.support.engine_pair import Pair, PairOptions, greedy
from tests.support.models import prompt_of
from tests.support.nodes import adapters_at, card_at

NUM_TOKENS = 12
PROMPT = prompt_of(87, seed=700)
NAMES = ("one", "two", "three")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(model_folder, root / name, seed=seed)
    return root


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def pair(request: pytest.FixtureRequest, model_folder: Path, root: Path) -> Iterator[Pair]:
    adapters = AdapterConfig(
        adapters=(AdapterFolder("one", root / "one"),), root=root, max_loras=1, max_cpu_loras=2
    )
    options = PairOptions(model_folder, adapters=adapters, async_scheduling=request.param)
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


def ref_of(pair: Pair, name: str) -> AdapterRef:
    [found] = [each.adapter for each in adapters_at(pair.p.address) if each.adapter.name == name]
    return found


def test_handed_over_tokens_equal_those_of_one_engine(
    pair: Pair, answers: dict[str, list[int]]
) -> None:
    answer = pair.answer(PROMPT, greedy(NUM_TOKENS), ref_of(pair, "one"))

    assert answer.was_handed_over
    assert answer.token_ids == answers["one"]
    assert answers["one"] != answers[""]
    assert pair.answer(PROMPT, greedy(NUM_TOKENS)).token_ids == answers[""]
    assert card_at(pair.p.address).max_loras == 1
    pair.await_all_free()
