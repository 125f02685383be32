"""Vectors of the tokens of texts equal those of transformers, in any batch and chunking."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from baton.core.errors import InvalidRequest, ModelError
from baton.core.request import EMBED, TOKEN_EMBED, UNSAMPLED
from baton.core.sampling import SamplingParams
from baton.core.vectors import Floats
from baton.engine.config import EngineOptions
from baton.engine.factory import build_engine
from baton.llm import LLM
from tests.support.encoders import make_encoder, pooled
from tests.support.models import prompt_of, reference

# A token, a block, several blocks, and several chunks.
TEXTS = [prompt_of(length, seed=length) for length in (1, 16, 33, 100)]
SHORT = [[token % 300 + 10 for token in prompt_of(length)] for length in (1, 7, 30, 100, 7)]
TOLERANCE = 1e-4
SIZE = 24  # of projections


def open_llm(folder: Path, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 24, **settings}
    return LLM(str(folder), show_progress=False, **settings)


def open_encoder(folder: Path, **settings: Any) -> LLM:
    return open_llm(folder, max_num_batched_tokens=130, **settings)


def hidden_states(model: Any, text: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([text])).last_hidden_state[0].float()
    return found


def expected(model: Any, text: Sequence[int], *layers: torch.nn.Module) -> Floats:
    states = hidden_states(model, text)
    with torch.no_grad():
        for layer in layers:
            states = layer(states)
    found: Floats = functional.normalize(states, dim=-1).numpy()
    return found


def assert_close(found: Sequence[Floats], wanted: Sequence[Floats]) -> None:
    for vectors, others in zip(found, wanted, strict=True):
        assert vectors.shape == others.shape
        assert np.abs(vectors - others).max() < TOLERANCE


@pytest.mark.parametrize("pooling", ["last", "cls", "tokens"])
def test_vectors_of_a_decoder(pooling: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    with open_llm(folder, pooling=pooling) as llm:
        together = llm.embed_tokens(TEXTS)
        again = llm.embed_tokens(TEXTS)
        alone = [llm.embed_tokens(text)[0] for text in TEXTS]
        [cut] = llm.embed_tokens(TEXTS[-1], truncate_prompt_tokens=30, dimensions=10)
        llm.engine.scheduler.check()

    wanted = [expected(reference(folder).model, text) for text in TEXTS]
    for found in (together, again, alone):
        assert_close(found, wanted)
    first = wanted[-1][:30, :10]
    assert_close([cut], [first / np.linalg.norm(first, axis=1, keepdims=True)])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_vectors_beside_answers_and_embeddings(
    model_folder: Callable[[str], Path], *, async_scheduling: bool
) -> None:
    """Texts that are preempted are computed again, and share passes with other requests."""
    folder = model_folder("qwen3")
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [prompt_of(length, seed=1) for length in (3, 20, 40)]
    with open_llm(folder, pooling="last") as llm:
        answers = [answer.token_ids for answer in llm.generate(prompts, sampling)]
        embeddings = llm.embed(TEXTS)
    with open_llm(folder, pooling="last", kv_cache_memory="144KiB") as llm:
        pooled_texts = [
            replace(llm._make_request(text, UNSAMPLED), task=task)
            for text in TEXTS
            for task in (EMBED, TOKEN_EMBED)
        ]
        requests = [*(llm._make_request(prompt, sampling) for prompt in prompts), *pooled_texts]
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
        num_preemptions = engine.scheduler.stats().total_preemptions

    assert num_preemptions > 0
    assert [tokens[request.request_id] for request in requests[: len(prompts)]] == answers
    vectors = [np.frombuffer(found[each.request_id], "<f4") for each in pooled_texts]
    assert_close(vectors[::2], embeddings)
    wanted = [expected(reference(folder).model, text).reshape(-1) for text in TEXTS]
    assert_close(vectors[1::2], wanted)


@pytest.mark.parametrize("pooling", ["mean", "tokens"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_vectors_of_an_encoder(kind: str, pooling: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, kind)
    with open_encoder(tmp_path, pooling=pooling) as llm:
        together = llm.embed_tokens(SHORT)
        alone = [llm.embed_tokens(text)[0] for text in SHORT]

    wanted = [expected(model, text) for text in SHORT]
    assert_close(together, wanted)
    assert_close(alone, wanted)


def test_texts_of_an_encoder_that_are_pooled_beside_others(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "bert")
    with open_encoder(tmp_path, pooling="mean") as llm:
        requests = [
            replace(llm._make_request(text, UNSAMPLED), task=task)
            for text in SHORT[:3]
            for task in (EMBED, TOKEN_EMBED)
        ]
        for request in requests:
            llm.engine.scheduler.add(request)
        found = {each.request_id: each.vector for each in llm.engine.step()}
    vectors = [np.frombuffer(found[each.request_id], "<f4") for each in requests]

    assert_close(vectors[::2], [pooled(model, text, "mean") for text in SHORT[:3]])
    assert_close(vectors[1::2], [expected(model, text).reshape(-1) for text in SHORT[:3]])


def dense(folder: Path, num_inputs: int, *, bias: bool = False, tanh: bool = False) -> Any:
    """Write a random Dense module as sentence-transformers stores it, and return it."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(num_inputs, SIZE, bias=bias)
    folder.mkdir()
    function = "torch.nn.modules.activation.Tanh" if tanh else "torch.nn.modules.linear.Identity"
    sizes = {"in_features": num_inputs, "out_features": SIZE, "bias": bias}
    (folder / "config.json").write_text(json.dumps({**sizes, "activation_function": function}))
    tensors = {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return layer


def write_modules(folder: Path, *names: str) -> None:
    modules = [{"type": "x.Transformer", "path": ""}]
    modules += [{"type": f"x.{name}", "path": f"1_{name}"} for name in names]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_folders_of_pylate(kind: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, kind)
    layer = dense(tmp_path / "1_Dense", 64)
    write_modules(tmp_path, "Dense")
    with open_encoder(tmp_path) as llm:
        assert llm.info.vector_size == SIZE
        found = llm.embed_tokens(SHORT)
        with pytest.raises(InvalidRequest, match=r"a vector for each token.*token_embed"):
            llm.embed("a")

    assert_close(found, [expected(model, text, layer) for text in SHORT])


def test_folders_of_colbert(tmp_path: Path) -> None:
    """The projection is among the tensors of the encoder, whose architecture has its own name."""
    model = make_encoder(tmp_path, "bert")
    layer = torch.nn.Linear(64, SIZE, bias=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    save_file({**tensors, "linear.weight": layer.weight.detach()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    with open_encoder(tmp_path) as llm:
        found = llm.embed_tokens(SHORT)

    assert_close(found, [expected(model, text, layer) for text in SHORT])


def test_dense_layers_behind_the_pooling(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("qwen3"), folder)
    layer = dense(folder / "1_Dense", 64, bias=True, tanh=True)
    write_modules(folder, "Pooling", "Dense", "Normalize")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    with open_llm(folder) as llm:
        found, by_token = llm.embed(TEXTS), llm.embed_tokens(TEXTS)
        with pytest.raises(InvalidRequest, match=f"embeddings have {SIZE}"):
            llm.embed("a", dimensions=SIZE + 1)

    layers = layer, torch.nn.Tanh()
    wanted = [expected(reference(model_folder("qwen3")).model, text, *layers) for text in TEXTS]
    assert_close(found, [vectors[-1] for vectors in wanted])
    assert_close(by_token, wanted)


@pytest.mark.parametrize(
    ("num_inputs", "change", "message"),
    [
        (32, "", "takes 32 numbers; the one before it gives 64"),
        (64, "shape", "has the shape"),
        (64, "missing", "has neither model.safetensors"),
        (64, "more", "tensors that this architecture does not use: other"),
        (64, "cut", "corrupt or cut short"),
    ],
)
def test_faulty_projections(num_inputs: int, change: str, message: str, tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert")
    layer = dense(tmp_path / "1_Dense", num_inputs)
    write_modules(tmp_path, "Dense")
    path = tmp_path / "1_Dense" / "model.safetensors"
    tensors = {"linear.weight": layer.weight.detach()}
    if change == "shape":
        save_file({"linear.weight": torch.zeros(2, 2)}, path)
    elif change == "missing":
        path.unlink()
    elif change == "more":
        save_file({**tensors, "other": torch.zeros(1)}, path)
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=message):
        open_encoder(tmp_path)


def test_classifiers_have_no_vectors_of_tokens(tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    with open_encoder(tmp_path) as llm, pytest.raises(InvalidRequest, match="scores texts"):
        llm.embed_tokens("a")


def test_cosines_of_int8_weights(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    with open_llm(folder, pooling="last", dtype="bfloat16", quantize="int8") as llm:
        found = llm.embed_tokens(TEXTS)

    for text, vectors in zip(TEXTS, found, strict=True):
        cosines = (vectors * expected(reference(folder).model, text)).sum(-1)
        assert cosines.min() >= 0.97
        assert cosines.mean() >= 0.99
