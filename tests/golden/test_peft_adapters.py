"""Adapters saved by PEFT: tokens and logprobs equal those of the weights that PEFT merges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.peft_folder import PeftFolder
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError
from baton.core.sampling import SamplingParams
from baton.engine.runner.adapters.places import AdapterPlaces
from baton.engine.runner.families.read_config import read_model_config
from baton.llm import LLM
from tests.support.models import VARIANTS, prompt_of, reference_choices, reference_logprobs
from tests.support.peft_adapters import save_adapter, save_and_merge

FolderOf = Callable[[str], Path]
NUM_TOKENS = 12
TOLERANCE = 1e-4
PROMPTS = [prompt_of(length, seed=length) for length in (3, 40)]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# Family and settings of the adapter.
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "all linear layers": ("llama", {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}),
    "biased linear layers": (
        "llama-mha-biased-sharded",
        {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1},
    ),
    "patterns": (
        "qwen3",
        {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"q_proj": 2, r".*\.1\.mlp\.down_proj": 8, "0.self_attn.v_proj": 1},
            "alpha_pattern": {"down_proj": 16, r"1\.self_attn\.[qk]_proj": 1},
        },
    ),
    "rsLoRA": (
        "gemma3",
        {
            "r": 6,
            "lora_alpha": 3,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj"],
            "rank_pattern": {"up_proj": 3},
        },
    ),
    "sparse gates beside streams of hidden states": (
        "gemma3n",
        {"r": 4, "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    ),
    "some layers": (
        "olmo2",
        {"r": 3, "target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
    ),
    "fused matrices": ("phi3", {"r": 4, "target_modules": "all-linear", "use_rslora": True}),
    "a regular expression": (
        "glm4",
        {"r": 4, "target_modules": r".*\.(0\.self_attn\.k_proj|1\.mlp\.(gate_up|down)_proj)"},
    ),
    # PEFT stacks the matrices of all experts, and adapts the router.
    "experts and router": (
        "qwen3-moe",
        {"r": 4, "target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
    ),
    "experts of one parameter": (
        "qwen3-moe",
        {
            "r": 3,
            "use_rslora": True,
            "target_modules": ["v_proj"],
            "target_parameters": ["mlp.experts.down_proj"],
        },
    ),
    "interleaved experts": (
        "gpt-oss",
        {
            "r": 3,
            "target_modules": ATTENTION,
            "target_parameters": ["experts.gate_up_proj", "1.mlp.experts.down_proj"],
        },
    ),
    "shared experts": ("qwen2-moe", {"r": 3, "target_modules": "all-linear"}),
    "latent attention": (
        "deepseek-v3",
        {"r": 4, "target_modules": "all-linear", "alpha_pattern": {"kv_b_proj": 24}},
    ),
    "latent attention, queries in one step": (
        "deepseek-v2-lite",
        {"r": 2, "target_modules": ["q_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
    "delta rule": ("qwen3-next", {"r": 4, "target_modules": "all-linear"}),
    "delta rule of separate projections": (
        "olmo-hybrid",
        {"r": 4, "target_modules": [*ATTENTION, "g_proj", "a_proj", "b_proj"]},
    ),
    "Mamba2": ("granite-4-moe", {"r": 4, "target_modules": ["in_proj", "out_proj", "q_proj"]}),
    "short convolutions": ("lfm2", {"r": 4, "target_modules": ["in_proj", "out_proj", "q_proj"]}),
    "the text part of a model with images": (
        "smolvlm",
        {"r": 4, "target_modules": r".*\.text_model\..*\.(q_proj|o_proj|up_proj)"},
    ),
    "rotated halves": ("glm", {"r": 4, "target_modules": ATTENTION, "init_lora_weights": "eva"}),
}


@pytest.fixture(scope="session")
def folder_of(model_folder: FolderOf, family_folder: FolderOf) -> FolderOf:
    return lambda name: (model_folder if name in VARIANTS else family_folder)(name)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_equal_those_of_merged_weights(
    name: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    family, settings = CASES[name]
    base = folder_of(family)
    adapter = save_and_merge(base, tmp_path, **settings)
    llm = LLM(
        str(base),
        lora={"own": str(adapter.folder)},
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=24,
        show_progress=False,
    )
    prompts = [*PROMPTS, *PROMPTS]
    with llm:
        answers = llm.generate(prompts, GREEDY, lora=["own", "own", "", ""])

    for prompt, answer, folder in zip(
        prompts, answers, [adapter.merged] * 2 + [base] * 2, strict=True
    ):
        assert answer.token_ids == reference_choices(folder, prompt, answer.token_ids, NUM_TOKENS)
        rows = reference_logprobs(folder, [*prompt, *answer.token_ids])[len(prompt) - 1 :]
        for found, row in zip(answer.logprobs, rows, strict=False):
            assert found.logprob == pytest.approx(float(row[found.token_id]), abs=TOLERANCE)
    assert answers[1].token_ids != answers[3].token_ids


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_modules": ATTENTION, "use_dora": True}, "use_dora"),
        ({"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ATTENTION, "lora_bias": True}, "lora_bias"),
        ({"target_modules": ATTENTION, "bias": "lora_only"}, "bias"),
        ({"target_modules": ATTENTION, "init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": ATTENTION, "trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    settings: dict[str, Any], expected: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    base = folder_of("llama")
    folder = save_adapter(base, tmp_path, r=2, **settings)

    with pytest.raises(ModelError, match=expected):
        list(AdapterPlaces(read_model_config(SafetensorsFolder(base))).parts(PeftFolder(folder), 8))


def test_adapters_of_layers_with_attention_and_a_state_are_refused(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    base = folder_of("falcon-h1")
    folder = save_adapter(base, tmp_path, r=2, target_modules=ATTENTION)

    with pytest.raises(ModelError, match=r"self_attn.*FalconH1ForCausalLM"):
        list(AdapterPlaces(read_model_config(SafetensorsFolder(base))).parts(PeftFolder(folder), 8))
