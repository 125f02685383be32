"""Demo model on native kernels against plain torch in the same dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.support.kernels import kernels_by_variant

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
TEXT = "def read_lines(path):\n    with open(path) as file:\n        return file.read()\n"
PROMPTS = [TEXT * 3, "import os\n", "class Queue:\n    def __init__(self):\n        self."]
# The fifth token of each answer is a near tie.
NEAR_TIES = [
    f"# Request {number} of many, long enough to fill some blocks.\n" + "import os, sys\n" * 20
    for number in range(12)
]
# bfloat16 keeps eight bits: logits near ten are known to about a sixteenth.
TOLERANCE = 0.15

needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")


def logprobs_of(kernels: str) -> torch.Tensor:
    """Return the logprob of each token of the text, given the tokens before it."""
    with LLM(str(MODEL), dtype="bfloat16", kernels=kernels, kv_cache_memory="16MiB") as llm:
        [answer] = llm.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert answer.prompt_logprobs is not None
    return torch.tensor([one.logprob for one in answer.prompt_logprobs if one is not None])


@needs_kernels
def test_logprobs_with_native_kernels_are_close_to_those_of_torch() -> None:
    native, plain = logprobs_of("native"), logprobs_of("torch")

    assert len(native) == len(plain) > 20
    assert (native - plain).abs().max() < TOLERANCE


@needs_kernels
def test_greedy_answers_are_the_same_alone_in_a_batch_and_with_a_cached_prefix() -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(str(MODEL), dtype="bfloat16", kernels="native", kv_cache_memory="16MiB") as llm:
        alone = [llm.generate(prompt, sampling)[0].token_ids for prompt in PROMPTS]
        together = [answer.token_ids for answer in llm.generate(PROMPTS, sampling)]

    assert together == alone


@needs_kernels
def test_an_answer_continues_identically_from_a_prompt_with_its_tokens() -> None:
    """Covers an answer that continues on another node."""
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=2)
    with LLM(str(MODEL), dtype="bfloat16", kernels="native", enable_prefix_caching=False) as llm:
        prompts = [llm.tokenizer.encode(prompt) for prompt in NEAR_TIES]
        whole = llm.generate(prompts, sampling)
        for given in range(1, 8):
            begun = [
                (*prompt, *answer.token_ids[:given])
                for prompt, answer in zip(prompts, whole, strict=True)
            ]
            rest = llm.generate(begun, replace(sampling, max_tokens=16 - given))
            assert [answer.token_ids for answer in rest] == [
                answer.token_ids[given:] for answer in whole
            ]

    for answer in whole:
        (_, likeliest), (_, second) = answer.logprobs[4].top
        assert likeliest - second < 0.1
