"""Real models from their GGUF files: the greedy tokens of transformers, here and in a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from baton.checkpoint.gguf.architectures import read_config
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.client import Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.real.conftest import NODE_ARGUMENTS
from tests.support.client_load import ClientRequest, answer_all
from tests.support.real_models import gemma3, smollm2
from tests.support.real_prompts import TEXTS, long_text

pytestmark = pytest.mark.slow
# `BATON_REAL_PROMPTS=all` runs all prompts for 64 tokens, one with more than 1,000, which takes
# minutes longer.
RUNS_ALL = os.environ.get("BATON_REAL_PROMPTS") == "all"
NUM_TEXTS, NUM_TOKENS = (len(TEXTS), 64) if RUNS_ALL else (4, 12)
PASSAGE_TOKENS = 40  # at least
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PATIENCE_S = 600.0  # for all answers at once
CLOSE = 1e-3  # logits of two tokens that rounding may swap


class Reference:
    """The model of transformers with the dequantized numbers of the file, in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def assert_greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Check that each token has the highest logit after those before it."""
        with torch.no_grad():
            found = self.model(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=len(answer))
        following = found.logits[0]
        chosen = following[torch.arange(len(answer)), torch.tensor(answer)]
        assert (following.amax(dim=1) - chosen).max() <= CLOSE


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model's file, and what transformers and llama.cpp make of it."""

    find: Callable[[], Path]
    model: type[PreTrainedModel]
    architecture: gguf.MODEL_ARCH
    has_paired_heads: bool = False  # llama.cpp stores the rows of queries and keys in pairs
    norm_offset: float = 0.0  # that llama.cpp adds to the weights of norms
    window: int = 0

    @property
    def long_prompt(self) -> int:
        """Return the number of tokens that the longest prompt exceeds."""
        return 1000 if RUNS_ALL else max(self.window, 128)

    def read(self, path: Path) -> PreTrainedModel:
        """Return the model with the tensors of the file, as llama.cpp's package reads them."""
        file = GgufFile.read(path)
        fields = read_config(file)
        config_class = self.model.config_class
        assert config_class is not None
        config = config_class(**{name: fields.get(name) for name in fields.names()})
        with no_init_weights():
            model = self.model(config)
        model.load_state_dict(self._tensors(file, model), assign=True)
        model.tie_weights()
        return model

    def _tensors(self, file: GgufFile, model: PreTrainedModel) -> dict[str, Tensor]:
        config = model.config
        found: dict[str, Tensor] = {}
        # Without its class, since slices of a memmap take long to make.
        stored, content = file.tensors, np.asarray(np.memmap(file.path, mode="c"))
        names = gguf.get_tensor_name_map(self.architecture, config.num_hidden_layers)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for name in model.state_dict():
            if name == "lm_head.weight":
                found[name] = found["model.embed_tokens.weight"]  # they are tied
                continue
            part = name.rsplit(".", 2)[-2]
            one = stored[names.get_name(name, (".weight",)) or ""]
            rows = content[one.offset : one.offset + one.num_bytes].reshape(*one.shape[:-1], -1)
            kind = gguf.GGMLQuantizationType[one.type.name]
            tensor = torch.from_numpy(gguf.quants.dequantize(rows, kind))
            if self.has_paired_heads and part in heads:
                tensor = tensor.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
            found[name] = tensor - self.norm_offset if part.endswith("norm") else tensor
        return found


MODELS = {
    "smollm2": RealModel(smollm2, LlamaForCausalLM, gguf.MODEL_ARCH.LLAMA, has_paired_heads=True),
    "gemma3": RealModel(
        gemma3, Gemma3ForCausalLM, gguf.MODEL_ARCH.GEMMA3, norm_offset=1.0, window=512
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def real_model(request: pytest.FixtureRequest) -> RealModel:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def model_file(real_model: RealModel) -> Path:
    return real_model.find()


@pytest.fixture(scope="module")
def reference(real_model: RealModel, model_file: Path) -> Reference:
    """Return the file read by transformers, or faster by llama.cpp's package."""
    if RUNS_ALL:
        names = {"gguf_file": model_file.name, "dtype": torch.float32}
        return Reference(AutoModelForCausalLM.from_pretrained(model_file.parent, **names))
    return Reference(real_model.read(model_file))


@pytest.fixture(scope="module")
def llm(model_file: Path) -> Iterator[LLM]:
    with LLM(str(model_file), dtype="float32", kv_cache_memory="512MiB") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompts(llm: LLM, real_model: RealModel) -> list[list[int]]:
    long = long_text(-(-real_model.long_prompt // PASSAGE_TOKENS))
    prompts = [llm.tokenizer.encode(text) for text in (*TEXTS[:NUM_TEXTS], long)]
    assert len(prompts[-1]) > real_model.long_prompt
    return prompts


@pytest.fixture(scope="module")
def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in llm.generate(prompts, GREEDY)]


def test_greedy_tokens_are_those_of_transformers(
    prompts: list[list[int]], answers: list[list[int]], reference: Reference
) -> None:
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
        found = answer_all(running.address, requests, timeout_s=PATIENCE_S)

    assert [list(each.token_ids) for each in found] == answers
    assert all(each.finish.served.kv_bytes for each in found)
