"""Embeddings and scores of texts equal those of transformers, in any batch and chunking."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.errors import InvalidRequest, ModelError
from baton.core.request import EMBED, UNSAMPLED
from baton.core.sampling import SamplingParams
from baton.core.vectors import Floats
from baton.engine.config import EngineOptions
from baton.engine.factory import build_engine
from baton.llm import LLM
from tests.support.models import (
    VARIANTS,
    VOCAB_SIZE,
    import_transformers,
    prompt_of,
    reference,
    save_tokenizer,
)

FolderOf = Callable[[str], Path]
# A token, a block, several blocks, and several chunks.
LENGTHS = (1, 16, 33, 100)
TEXTS = [prompt_of(length, seed=length) for length in LENGTHS]
TOLERANCE = 1e-4
KINDS = ("last", "mean", "cls")
FAMILIES = ("qwen3", "mistral-window", "gemma3")
COSINES = {"bfloat16": 0.999, "int8": 0.99, "int4": 0.9}
LABELS = (1, 3)


@pytest.fixture(scope="session")
def folder_of(
    model_folder: Callable[[str], Path], family_folder: Callable[[str], Path]
) -> FolderOf:
    return lambda name: (model_folder if name in VARIANTS else family_folder)(name)


def open_llm(folder: Path, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 24, **settings}
    return LLM(str(folder), show_progress=False, **settings)


def expected(folder: Path, text: Sequence[int], kind: str) -> Floats:
    model = reference(folder)
    with torch.no_grad():
        states = model.model(torch.tensor([text])).last_hidden_state[0].float()
    pooled = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]
    return np.asarray(torch.nn.functional.normalize(pooled, dim=0).numpy())


def assert_close(found: Sequence[Floats], wanted: Sequence[Floats]) -> None:
    for vector, other in zip(found, wanted, strict=True):
        assert np.abs(vector - other).max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in FAMILIES for kind in KINDS),
        ("qwen3-moe", "mean"),
        ("deepseek-v3", "mean"),
        ("qwen3-next", "last"),
        ("granite-4", "cls"),
    ],
)
def test_embeddings_equal_those_of_transformers(name: str, kind: str, folder_of: FolderOf) -> None:
    folder = folder_of(name)
    with open_llm(folder, pooling=kind) as llm:
        together = llm.embed(TEXTS)
        again = llm.embed(TEXTS)  # with what is in the prefix cache
        alone = [llm.embed(text)[0] for text in TEXTS]
        llm.engine.scheduler.check()

    wanted = [expected(folder, text, kind) for text in TEXTS]
    for found in (together, again, alone):
        assert_close(found, wanted)


def test_the_last_token_uses_cached_prefixes(folder_of: FolderOf) -> None:
    text = prompt_of(100)
    for kind, is_cached in (("last", True), ("mean", False)):
        with open_llm(folder_of("qwen3"), pooling=kind) as llm:
            llm.embed(text)
            llm.embed([*text, 5])
            assert (llm.engine.scheduler.stats().total_prefix_hit_tokens > 0) is is_cached


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_beside_answers(
    kind: str, folder_of: FolderOf, *, async_scheduling: bool
) -> None:
    """Rows that end with tokens and rows that end with vectors share passes, and preempt."""
    folder = folder_of("qwen3")
    prompts = [prompt_of(length, seed=1) for length in (3, 20, 40)]
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with open_llm(folder, pooling=kind) as llm:
        answers = [answer.token_ids for answer in llm.generate(prompts, sampling)]
        vectors = llm.embed(TEXTS)
    with open_llm(folder, pooling=kind, kv_cache_memory="144KiB") as llm:
        requests = [
            *(llm._make_request(prompt, sampling) for prompt in prompts),
            *(_pooled(llm, text) for text in TEXTS),
        ]
        scheduling = replace(llm.engine.scheduler.config, async_scheduling=async_scheduling)
        engine = build_engine(llm._runner, EngineOptions(scheduling))
        for request in requests:
            engine.scheduler.add(request)
        tokens: dict[str, list[int]] = {}
        found: dict[str, bytes] = {}
        while engine.scheduler.request_ids():
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                found[output.request_id] = output.vector
        engine.close()
        engine.scheduler.check()
        num_preemptions = engine.scheduler.stats().total_preemptions

    ids = [request.request_id for request in requests]
    assert num_preemptions > 0
    assert [tokens[key] for key in ids[: len(prompts)]] == answers
    assert_close([np.frombuffer(found[key], "<f4") for key in ids[len(prompts) :]], vectors)


def _pooled(llm: LLM, text: Sequence[int]) -> Any:
    return replace(llm._make_request(text, UNSAMPLED), task=EMBED)


@pytest.mark.parametrize("how", COSINES)
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_cosines_of_smaller_numbers(how: str, kind: str, folder_of: FolderOf) -> None:
    folder = folder_of("qwen3")
    quantize = how if how.startswith("int") else "none"
    with open_llm(folder, pooling=kind, dtype="bfloat16", quantize=quantize) as llm:
        vectors = llm.embed(TEXTS)

    for text, vector in zip(TEXTS, vectors, strict=True):
        assert vector @ expected(folder, text, kind) >= COSINES[how]


def test_first_tokens_of_recurrent_layers_lose_less_than_in_transformers(
    folder_of: FolderOf,
) -> None:
    """In bfloat16, transformers also rounds between the projections of such a layer."""
    folder, texts = folder_of("qwen3.5"), [(token,) for token in range(3, VOCAB_SIZE)]
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 64}
    with open_llm(folder, pooling="last", dtype="bfloat16", **sizes) as llm:
        found = torch.from_numpy(np.array(llm.embed(texts)))

    exact = reference(folder)
    with torch.no_grad():
        wanted, half = (
            model.model(torch.tensor(texts)).last_hidden_state[:, 0].float()
            for model in (exact, deepcopy(exact).bfloat16())
        )
    unit = torch.nn.functional.normalize
    losses, half_losses = ((unit(each) - unit(wanted)).norm(dim=1) for each in (found, half))
    assert (losses / half_losses).log().mean().exp() < 0.93  # 0.89; with its roundings 0.96


@pytest.mark.parametrize("num_labels", LABELS)
def test_scores_equal_those_of_transformers(num_labels: int, tmp_path: Path) -> None:
    transformers = import_transformers()
    torch.manual_seed(num_labels)
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        initializer_range=0.25,
        num_labels=num_labels,
    )
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with open_llm(tmp_path) as llm:
        scores = llm.embed(TEXTS)
        with pytest.raises(InvalidRequest, match="generates no text"):
            llm.generate("a")

    with torch.no_grad():
        logits = [model(torch.tensor([text])).logits[0] for text in TEXTS]
    wanted = [each.sigmoid() if num_labels == 1 else each.softmax(0) for each in logits]
    assert_close(scores, [each.numpy() for each in wanted])


@pytest.mark.parametrize("is_tied", [False, True])
def test_scores_of_a_reranker_that_has_a_head_for_tokens(
    is_tied: bool, folder_of: FolderOf, tmp_path: Path
) -> None:
    """As Qwen3-Reranker: the share of "yes", of these two tokens."""
    folder = folder_of("qwen3" if is_tied else "llama")
    model, tokenizer = reference(folder), load_tokenizer(folder)
    [[less], [more]] = [tokenizer.encode(each, add_special_tokens=False) for each in "ab"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is is_tied
    [name] = config["architectures"]
    architecture = name.replace("ForCausalLM", "ForSequenceClassification")
    changed = config | {"architectures": [architecture], "classifier_from_token": ["a", "b"]}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with open_llm(tmp_path) as llm:
        scores = llm.embed(TEXTS)

    with torch.no_grad():
        logits = [model(torch.tensor([text])).logits[0, -1, [less, more]] for text in TEXTS]
    assert_close(scores, [each.softmax(0)[1:].numpy() for each in logits])

    for words in ("yes", ["a"], ["a", "several tokens"], [1, 2]):
        changed["classifier_from_token"] = words
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ModelError, match="classifier_from_token"):
            open_llm(tmp_path)


def test_a_folder_without_a_head(tmp_path: Path, folder_of: FolderOf) -> None:
    """`save_pretrained` of the model without its head leaves out the first part of all names."""
    folder = folder_of("qwen3")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    short.pop("lm_head.weight", None)
    save_file(short, tmp_path / "model.safetensors", {"format": "pt"})
    save_tokenizer(tmp_path)
    write_modules(tmp_path, "lasttoken")
    with open_llm(tmp_path) as llm:
        vectors = llm.embed(TEXTS)

    assert_close(vectors, [expected(folder, text, "last") for text in TEXTS])


def write_modules(folder: Path, mode: str) -> None:
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "x.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {"pooling_mode_cls_token": False, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))


def test_dimensions(folder_of: FolderOf) -> None:
    folder = folder_of("qwen3")
    with open_llm(folder, pooling="mean") as llm:
        [short] = llm.embed(TEXTS[-1], dimensions=10)
        whole = llm.embed(TEXTS[-1])[0]
        for wrong in (0, 65):
            with pytest.raises(InvalidRequest, match="have 64"):
                llm.embed(TEXTS[-1], dimensions=wrong)

    assert np.allclose(short, whole[:10] / np.linalg.norm(whole[:10]), atol=1e-6)


def test_texts_of_the_whole_context(folder_of: FolderOf) -> None:
    with open_llm(folder_of("qwen3"), pooling="last", max_model_len=48) as llm:
        assert len(llm.embed(prompt_of(48))) == 1
        with pytest.raises(InvalidRequest, match="prompt 1: the text has 49 tokens"):
            llm.embed([prompt_of(3), prompt_of(49)])


def test_a_model_without_pooling_embeds_nothing(folder_of: FolderOf) -> None:
    with (
        open_llm(folder_of("qwen3")) as llm,
        pytest.raises(InvalidRequest, match="--pooling"),
    ):
        llm.embed("a")
