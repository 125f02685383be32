"""A real embedder: all-MiniLM-L6-v2 embeds as transformers does, whatever the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from baton.core.vectors import Floats
from baton.llm import LLM
from tests.support.encoders import pooled
from tests.support.real_models import minilm
from tests.support.real_prompts import TEXTS

pytestmark = pytest.mark.slow
MAX_TOKENS = 256
QUERY = "What is the capital of France?"
DOCUMENTS = ["Bananas are yellow.", "Paris is the capital of France.", "France makes cheese."]
COSINES: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.999),
    "int8": ({"dtype": "bfloat16", "quantize": "int8"}, 0.99),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return minilm()


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[Floats]:
    """Return embeddings by transformers of each text alone, cut as sentence-transformers does."""
    model, tokenizer = (
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    with torch.no_grad():
        tokens = [tokenizer(text, truncation=True, max_length=MAX_TOKENS) for text in TEXTS]
        return [pooled(model, each["input_ids"], "mean") for each in tokens]


def test_embeddings_equal_those_of_transformers(folder: Path, wanted: list[Floats]) -> None:
    with LLM(str(folder), show_progress=False) as llm:
        found = llm.embed(TEXTS, truncate_prompt_tokens=-1)
        scores = llm.score(QUERY, DOCUMENTS)

    assert np.abs(np.array(found) - wanted).max() < 1e-4
    assert np.argmax(scores) == 1
    assert np.argmin(scores) == 0


@pytest.mark.parametrize("how", COSINES)
def test_cosines_of_smaller_numbers(how: str, folder: Path, wanted: list[Floats]) -> None:
    settings, least = COSINES[how]
    with LLM(str(folder), show_progress=False, **settings) as llm:
        found = llm.embed(TEXTS, truncate_prompt_tokens=-1)

    assert min(float(a @ b) for a, b in zip(found, wanted, strict=True)) >= least
