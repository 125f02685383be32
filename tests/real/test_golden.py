"""A real model from its GGUF file: the greedy tokens of transformers, here and in a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from baton.checkpoint.gguf.architectures import read_config
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.client import Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.real.conftest import NODE_ARGUMENTS
from tests.support.client_load import ClientRequest, answer_all
from tests.support.real_prompts import TEXTS, long_text

pytestmark = pytest.mark.slow
# `BATON_REAL_PROMPTS=all` runs all prompts for 64 tokens, which takes two minutes longer.
RUNS_ALL = os.environ.get("BATON_REAL_PROMPTS") == "all"
NUM_TEXTS, NUM_TOKENS = (len(TEXTS), 64) if RUNS_ALL else (5, 24)
ODD_TEXTS = ("naïve café 東京 🙂\t\r\n  x\x00y ", "<|im_start|>user\nhi")
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
CLOSE = 1e-3  # logits of two tokens that rounding may swap


class Reference:
    """The model of transformers with the dequantized numbers of the file, in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def assert_greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Check that each token has the highest logit after those before it."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
        following = logits[len(prompt) - 1 :]
        chosen = following[torch.arange(len(answer)), torch.tensor(answer)]
        assert (following.amax(dim=1) - chosen).max() <= CLOSE


@pytest.fixture(scope="module")
def reference(model_file: Path) -> Reference:
    """Return the file read by transformers, or faster by llama.cpp's package."""
    if RUNS_ALL:
        names = {"gguf_file": model_file.name, "dtype": torch.float32}
        return Reference(AutoModelForCausalLM.from_pretrained(model_file.parent, **names))
    fields = read_config(GgufFile.read(model_file))
    config = LlamaConfig(**{name: fields.get(name) for name in fields.names()})
    model = LlamaForCausalLM(config)
    model.load_state_dict(dequantized(model_file, model), assign=True)
    model.tie_weights()
    return Reference(model)


def dequantized(path: Path, model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the tensors of the file by their names in transformers, as llama.cpp reads them."""
    config, found = model.config, {}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name in model.state_dict():
        part = name.rsplit(".", 2)[-2]
        is_head = name == "lm_head.weight"  # which is tied
        stored_name = names.get_name("model.embed_tokens.weight" if is_head else name, (".weight",))
        one = stored[stored_name or ""]
        tensor = torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type))
        if part in heads:  # llama.cpp stores their rows in pairs
            tensor = tensor.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        found[name] = tensor
    return found


@pytest.fixture(scope="module")
def llm(model_file: Path) -> Iterator[LLM]:
    with LLM(str(model_file), dtype="float32", kv_cache_memory="512MiB") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.encode(text) for text in (*TEXTS[:NUM_TEXTS], long_text())]


@pytest.fixture(scope="module")
def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in llm.generate(prompts, GREEDY)]


def test_greedy_tokens_are_those_of_transformers(
    prompts: list[list[int]], answers: list[list[int]], reference: Reference
) -> None:
    assert max(map(len, prompts)) >= 1000
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        reference.assert_greedy(prompt, answer)


def test_a_cluster_gives_the_same_tokens(
    model_file: Path, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    arguments = (*NODE_ARGUMENTS, "--dtype", "float32")
    options = ClusterOptions(str(model_file), 1, 1, False, node_arguments=arguments)
    with LocalCluster(options) as running:
        requests = [ClientRequest(tuple(prompt), Generation(GREEDY)) for prompt in prompts]
        found = answer_all(running.address, requests)

    assert [list(each.token_ids) for each in found] == answers
    assert all(each.finish.served.kv_bytes for each in found)


@pytest.mark.skipif(not RUNS_ALL, reason="transformers takes a minute for the file")
def test_tokens_of_texts_are_those_of_transformers(llm: LLM, model_file: Path) -> None:
    reference = AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)

    for text in (*TEXTS, long_text(), *ODD_TEXTS):
        assert llm.tokenizer.encode(text) == reference.encode(text)
