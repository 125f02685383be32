"""Requests with adapters through all that an engine does with requests: the tokens of merged
weights, for each adapter of a batch and without one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.weights.quantize import to_int4, to_int6, to_int8
from baton.llm import LLM
from tests.support.adapters import merge, write_adapter
from tests.support.local_handoffs import LocalHandoffs
from tests.support.models import VARIANTS, prompt_of, reference_choices

NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = [prompt_of(length, seed=length) for length in (5, 33, 60)]

FolderOf = Callable[[str], Path]


class Variants(NamedTuple):
    """A base model and its adapters."""

    base: Path
    adapters: Mapping[str, str]  # folders by name
    merged: Mapping[str, Path]  # by name; the base without one

    def check(self, prompt: Sequence[int], name: str, answer: list[int]) -> None:
        assert answer == reference_choices(self.merged[name], prompt, answer, NUM_TOKENS)


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "gemma3"])
def variants(
    request: pytest.FixtureRequest,
    model_folder: FolderOf,
    family_folder: FolderOf,
    tmp_path_factory: pytest.TempPathFactory,
) -> Variants:
    base = (model_folder if request.param in VARIANTS else family_folder)(request.param)
    return make_variants(base, tmp_path_factory.mktemp(request.param))


def make_variants(base: Path, folder: Path) -> Variants:
    adapters = [write_adapter(base, folder / name, seed=ord(name)) for name in "ab"]
    merged = {each.name: merge(base, each, folder / f"merged-{each.name}") for each in adapters}
    return Variants(base, {each.name: str(each) for each in adapters}, {"": base, **merged})


def open_llm(variants: Variants, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 24, **settings}
    return LLM(str(variants.base), lora=variants.adapters, show_progress=False, **settings)


def answer_all(llm: LLM, variants: Variants, prompts: Sequence[Sequence[int]]) -> None:
    """Answer each prompt with each adapter and without, and check the tokens."""
    asked = [(prompt, name) for prompt in prompts for name in variants.merged]
    names = [name for _, name in asked]
    found = llm.generate([prompt for prompt, _ in asked], GREEDY, lora=names)
    for (prompt, name), answer in zip(asked, found, strict=True):
        variants.check(prompt, name, answer.token_ids)
    llm.engine.scheduler.check()


def test_prefix_hits(variants: Variants) -> None:
    with open_llm(variants) as llm:
        answer_all(llm, variants, PROMPTS)
        assert llm.engine.scheduler.stats().total_prefix_hit_tokens == 0
        answer_all(llm, variants, PROMPTS)
        assert llm.engine.scheduler.stats().total_prefix_hit_tokens >= 3 * (32 + 48)


def test_preemptions(variants: Variants) -> None:
    with open_llm(variants) as probe:
        memory = probe.kv_memory
        assert memory is not None
        block_bytes = len(memory.layout.groups) * memory.block_bytes
    with open_llm(variants, kv_cache_memory=12 * block_bytes) as llm:
        answer_all(llm, variants, [prompt_of(30, seed=seed) for seed in range(3)])
        assert llm.engine.scheduler.stats().total_preemptions > 0


def test_speculation(variants: Variants) -> None:
    repeating = [(5, 6, 7) * 12, prompt_of(33)]
    with open_llm(variants, speculative="ngram:4:fixed") as llm:
        answer_all(llm, variants, repeating)
        assert llm.engine.scheduler.stats().total_proposed_tokens > 0


def test_structured_output(variants: Variants) -> None:
    regex = r"[a-z]{3}( [a-z]{3}){2,20}"
    sampling = replace(GREEDY, ignore_eos=False, structured_outputs=StructuredOutputs(regex=regex))
    names = [*variants.merged]
    prompt = prompt_of(20)
    with open_llm(variants) as llm:
        together = llm.generate([prompt] * len(names), sampling, lora=names)
    for name, found in zip(names, together, strict=True):
        with LLM(str(variants.merged[name]), dtype="float32", show_progress=False) as llm:
            [expected] = llm.generate([prompt], sampling)
        assert found.token_ids == expected.token_ids
        assert re.fullmatch(r"[a-z ]+", found.text)
    assert len({found.text for found in together}) == len(names)


@contextmanager
def opened_handoffs(base: Path, num_decodes: int, **settings: Any) -> Iterator[LocalHandoffs]:
    config = RunnerConfig(
        str(base), kv_cache_bytes=4 << 20, max_num_seqs=8, max_loras=2, **settings
    )
    with ExitStack() as stack:
        prefill, *decodes = (
            stack.enter_context(load_runner(config)) for _ in range(1 + num_decodes)
        )
        yield stack.enter_context(LocalHandoffs(prefill, decodes, chunk=24))


@pytest.fixture
def handoffs(variants: Variants) -> Iterator[LocalHandoffs]:
    with opened_handoffs(variants.base, num_decodes=2) as opened:
        yield opened


def check_handoffs(handoffs: LocalHandoffs, variants: Variants) -> str:
    """Check an answer with each adapter and without, and return the id of the last one."""
    prompt, adapter_id = PROMPTS[-1], ""
    for name, folder in variants.adapters.items():
        for engine in (handoffs.prefill, *handoffs.decodes):
            adapter_id = engine.load_adapter(Path(folder))
        whole = handoffs.answer(prompt, NUM_TOKENS, adapter_id=adapter_id)
        variants.check(prompt, name, whole.token_ids)
        assert whole.num_received == len(prompt)
    plain = handoffs.answer(prompt, NUM_TOKENS)
    variants.check(prompt, "", plain.token_ids)
    return adapter_id


def test_hand_offs_and_the_death_of_a_decode_engine(
    variants: Variants, handoffs: LocalHandoffs
) -> None:
    adapter_id = check_handoffs(handoffs, variants)
    prompt, name = PROMPTS[-1], [*variants.adapters][-1]

    begun = handoffs.answer(prompt, NUM_TOKENS, until=6, adapter_id=adapter_id)
    handoffs.kill_decode()
    rest = handoffs.answer(prompt, NUM_TOKENS, prior=begun.token_ids, adapter_id=adapter_id)
    variants.check(prompt, name, begun.token_ids + rest.token_ids)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_bases(quantize: str, model_folder: FolderOf, tmp_path: Path) -> None:
    """The reference is the base with rounded numbers, into which the adapters are merged."""
    base = model_folder("llama")
    rounded = tmp_path / "rounded"
    shutil.copytree(base, rounded)
    tensors = load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            is_sensitive = re.search(r"embed|lm_head|[qkv]_proj|down_proj", name)
            rounds = to_int8 if quantize == "int8" else to_int6 if is_sensitive else to_int4
            tensors[name] = rounds(tensor).dequantize()
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    variants = make_variants(rounded, tmp_path)._replace(base=base)

    with open_llm(variants, quantize=quantize, kv_cache_memory="100KiB") as llm:
        answer_all(llm, variants, PROMPTS)
        assert llm.engine.scheduler.stats().total_preemptions > 0
    with opened_handoffs(base, num_decodes=1, quantize=quantize) as handoffs:
        check_handoffs(handoffs, variants)
