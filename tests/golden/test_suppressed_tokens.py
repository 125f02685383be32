"""Tokens that the files of a model suppress are never sampled, as in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.support.models import prompt_of, reference

PROMPT, NUM_TOKENS = list(prompt_of(20)), 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=NUM_TOKENS, temperature=1.5, seed=3, ignore_eos=True, logprobs=2, prompt_logprobs=1
)


def tokens_of(folder: Path, params: SamplingParams, **settings: Any) -> list[int]:
    with LLM(str(folder), show_progress=False, **settings) as llm:
        [answer] = llm.generate([PROMPT], params)
    assert answer.error is None
    return list(answer.token_ids)


@pytest.fixture
def suppressing(model_folder: Callable[[str], Path], tmp_path: Path) -> tuple[Path, list[int]]:
    """Return a folder, and the tokens that it suppresses: most of its plain answer."""
    plain = model_folder("qwen3")
    token_ids = sorted(set(tokens_of(plain, GREEDY, dtype="float32")[:12]))
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    settings = {"suppress_tokens": [*token_ids, 10**6]}  # one that the model does not have
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder, token_ids


def test_greedy_tokens_equal_those_of_transformers(suppressing: tuple[Path, list[int]]) -> None:
    folder, token_ids = suppressing
    found = tokens_of(folder, GREEDY, dtype="float32")

    with torch.no_grad():
        logits = reference(folder)(torch.tensor([PROMPT + found])).logits[0]
    logits[:, token_ids] = -torch.inf
    assert found == logits.argmax(dim=-1)[len(PROMPT) - 1 : -1].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("speculative", ["", "suffix:4"])
def test_no_suppressed_token_is_drawn(
    suppressing: tuple[Path, list[int]], dtype: str, speculative: str
) -> None:
    folder, token_ids = suppressing
    for params in (GREEDY, DRAWN):
        found = tokens_of(folder, params, dtype=dtype, speculative=speculative)
        assert not set(found) & set(token_ids)


def test_ranks_suppress_them_too(suppressing: tuple[Path, list[int]]) -> None:
    folder, token_ids = suppressing
    found = tokens_of(folder, DRAWN, dtype="float32", tensor_parallel_size=2)

    assert not set(found) & set(token_ids)
