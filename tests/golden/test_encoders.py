"""Embeddings and scores of encoders equal those of transformers, in any batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.core.errors import InvalidRequest
from baton.core.request import EMBED, UNSAMPLED
from baton.core.vectors import Floats, decode_vector
from baton.llm import LLM
from tests.support.encoders import ENCODERS, make_encoder, pooled, scored, tokenize_pair
from tests.support.models import prompt_of

ModelOf = Callable[[str], tuple[Path, Any]]
# A token, several texts of one length, and texts longer than the windows.
LENGTHS = (1, 7, 30, 100, 7, 30)
TEXTS = [
    [token % 300 + 10 for token in prompt_of(length, seed=index)]
    for index, length in enumerate(LENGTHS)
]
TOLERANCE = 1e-4
COSINES = {"bfloat16": 0.999, "int8": 0.99}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, make_encoder(folder, kind)
        return made[kind]

    return make


def open_llm(folder: Path, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 130, **settings}
    return LLM(str(folder), show_progress=False, **settings)


def assert_close(found: Sequence[Floats], wanted: Sequence[Floats]) -> None:
    for vector, other in zip(found, wanted, strict=True):
        assert np.abs(vector - other).max() < TOLERANCE


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_embeddings_equal_those_of_transformers(kind: str, pooling: str, model_of: ModelOf) -> None:
    folder, model = model_of(kind)
    with open_llm(folder, pooling=pooling) as llm:
        together = llm.embed(TEXTS)
        alone = [llm.embed(text)[0] for text in TEXTS]
        llm.engine.scheduler.check()

    wanted = [pooled(model, text, pooling) for text in TEXTS]
    assert_close(together, wanted)
    assert_close(alone, wanted)


@pytest.mark.parametrize("how", COSINES)
@pytest.mark.parametrize("kind", ENCODERS)
def test_cosines_of_smaller_numbers(kind: str, how: str, model_of: ModelOf) -> None:
    folder, model = model_of(kind)
    quantize = how if how == "int8" else "none"
    with open_llm(folder, pooling="mean", dtype="bfloat16", quantize=quantize) as llm:
        vectors = llm.embed(TEXTS)

    for text, vector in zip(TEXTS, vectors, strict=True):
        assert vector @ pooled(model, text, "mean") >= COSINES[how]


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("kind", ENCODERS)
def test_scores_equal_those_of_transformers(kind: str, num_labels: int, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, kind, "ForSequenceClassification", num_labels=num_labels)
    seconds = [len(text) // 2 for text in TEXTS]
    with open_llm(tmp_path) as llm:
        found = embed_pairs(llm, TEXTS, seconds)
        with pytest.raises(InvalidRequest, match="generates no text"):
            llm.generate("a")

    pairs = zip(TEXTS, seconds, strict=True)
    assert_close(found, [scored(model, text, second) for text, second in pairs])


@pytest.mark.parametrize(
    "field",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ],
)
def test_cross_encoders_can_give_logits(field: dict[str, Any], tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | field))
    with open_llm(tmp_path) as llm:
        [[found]] = llm.embed(TEXTS[2])

    [probability] = scored(model, TEXTS[2], 0)
    assert abs(1 / (1 + np.exp(-found)) - probability) < TOLERANCE
    assert abs(found - probability) > TOLERANCE


def embed_pairs(llm: LLM, texts: Sequence[list[int]], seconds: Sequence[int]) -> list[Floats]:
    found: dict[str, Floats] = {}
    requests = [
        replace(
            llm._make_request(text, UNSAMPLED),
            task=replace(EMBED, second_text_start=second),
        )
        for text, second in zip(texts, seconds, strict=True)
    ]
    for request in requests:
        llm.engine.scheduler.add(request)
    while llm.engine.scheduler.has_work:
        found |= {each.request_id: decode_vector(each.vector) for each in llm.engine.step()}
    llm.engine.scheduler.check()
    return [found[request.request_id] for request in requests]


DOCUMENTS = ("short", "A document with more words than the query has, " * 3, "x")


def test_scores_of_documents(tmp_path: Path) -> None:
    """A reranker sees query and document as a pair, the longer one cut."""
    model = make_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    with open_llm(tmp_path) as llm:
        for limit in (20, 130):
            found = llm.score("What is it?", DOCUMENTS, truncate_prompt_tokens=limit)
            for document, score in zip(DOCUMENTS, found, strict=True):
                pair = tokenize_pair(tmp_path, "What is it?", document, max_length=limit)
                second = pair["token_type_ids"].index(1)
                wanted = scored(model, pair["input_ids"], second)
                assert abs(score - wanted[0]) < TOLERANCE
        with pytest.raises(InvalidRequest, match="adds 3 special tokens"):
            llm.score("a", "b", truncate_prompt_tokens=3)


def test_similarities_of_documents(model_of: ModelOf) -> None:
    folder, model = model_of("bert")
    with open_llm(folder, pooling="cls") as llm:
        found = llm.score("What is it?", DOCUMENTS, truncate_prompt_tokens=-1)

    texts = ("What is it?", *DOCUMENTS)
    tokens = [tokenize_pair(folder, text, max_length=130)["input_ids"] for text in texts]
    query, *others = (pooled(model, each, "cls") for each in tokens)
    assert np.abs(np.array(found) - [query @ other for other in others]).max() < TOLERANCE


def test_several_labels_are_no_score(tmp_path: Path) -> None:
    make_encoder(tmp_path, "roberta", "ForSequenceClassification", num_labels=3)
    with open_llm(tmp_path) as llm, pytest.raises(InvalidRequest, match="gives 3 scores"):
        llm.score("a", "b")


def test_the_limit_of_an_embedder(tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    with open_llm(tmp_path, pooling="mean") as llm:
        assert llm.info.max_model_len == 20
        with pytest.raises(InvalidRequest, match="prompt 0: the text has 32 tokens"):
            llm.embed("y " * 15)
        [cut] = llm.embed("y " * 15, truncate_prompt_tokens=-1)
        [same] = llm.embed("y " * 9)
        assert np.array_equal(cut, same)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_folders_with_a_head_for_tokens_embed(kind: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, kind, "ForMaskedLM")
    with open_llm(tmp_path, pooling="mean") as llm:
        found = llm.embed(TEXTS)

    assert_close(found, [pooled(model.base_model, text, "mean") for text in TEXTS])


def test_texts_are_computed_whole(model_of: ModelOf) -> None:
    folder, _ = model_of("roberta")
    with open_llm(folder, pooling="mean", max_num_batched_tokens=110) as llm:
        assert llm.info.max_model_len == 128  # positions begin after that of the padding
        with pytest.raises(InvalidRequest, match="129 tokens; this model's maximum"):
            llm.embed([TEXTS[0], [5] * 129])
        with pytest.raises(InvalidRequest, match="at most max_num_batched_tokens \\(110\\)"):
            llm.embed([5] * 111)
