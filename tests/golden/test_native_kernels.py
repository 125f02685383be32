"""The demo model by native kernels, against plain torch in the same dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.llm import LLM
from engine.sampling import SamplingParams
from tests.support.kernels import kernels_by_variant

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
TEXT = "def read_lines(path):\n    with open(path) as file:\n        return file.read()\n"
PROMPTS = [TEXT * 3, "import os\n", "class Queue:\n    def __init__(self):\n        self."]
# bfloat16 keeps eight bits: logits near ten are known to about a sixteenth.
TOLERANCE = 0.15

needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")


def logprobs_of(kernels: str) -> torch.Tensor:
    """Of each token of the text, given those before it."""
    with LLM(str(MODEL), dtype="bfloat16", kernels=kernels, kv_cache_memory="16MiB") as llm:
        [answer] = llm.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert answer.prompt_logprobs is not None
    return torch.tensor([one.logprob for one in answer.prompt_logprobs if one is not None])


@needs_kernels
def test_native_kernels_find_a_text_as_likely_as_torch_does() -> None:
    native, plain = logprobs_of("native"), logprobs_of("torch")

    assert len(native) == len(plain) > 20
    assert (native - plain).abs().max() < TOLERANCE


@needs_kernels
def test_greedy_answers_are_the_same_alone_in_a_batch_and_with_their_prefix_cached() -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(str(MODEL), dtype="bfloat16", kernels="native", kv_cache_memory="16MiB") as llm:
        alone = [llm.generate(prompt, sampling)[0].token_ids for prompt in PROMPTS]
        together = [answer.token_ids for answer in llm.generate(PROMPTS, sampling)]

    assert together == alone
