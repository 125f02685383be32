"""Tensors of GGUF files under their names of the hub: shapes, joined parts, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.checkpoint.gguf.architectures import read_config, read_tensors
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.header import BLOCK_TYPES, Header, TensorEntry, Value
from baton.checkpoint.gguf.hub_tensors import groups_from_rounds
from baton.core.errors import ModelError

Shapes = Mapping[str, tuple[int, ...]]
COMMON = {"embedding_length": 8, "attention.head_count": 2, "block_count": 1}


def file_with(architecture: str, tensors: Shapes, **fields: Value) -> GgufFile:
    entries = {
        name: TensorEntry(name, shape, BLOCK_TYPES[0], 0, 0) for name, shape in tensors.items()
    }
    named = {f"{architecture}.{name}": value for name, value in {**COMMON, **fields}.items()}
    metadata = {"general.architecture": architecture, **named}
    return GgufFile([Header(Path("model.gguf"), metadata, entries)])


def test_keys_and_values_of_a_head_follow_each_other() -> None:
    tensors = {"blk.0.attn_v_b.weight": (2, 5, 6), "blk.0.attn_k_b.weight": (2, 6, 4)}

    found = read_tensors(file_with("deepseek2", tensors))

    [(name, tensor)] = found.items()
    assert name == "model.layers.0.self_attn.kv_b_proj.weight"
    assert tensor.shape == (2 * (4 + 5), 6)
    parts = [(source.entry.name[6:14], source.part) for source in tensor.sources]
    assert parts == [("attn_k_b", 0), ("attn_v_b", 0), ("attn_k_b", 1), ("attn_v_b", 1)]


def test_joined_queries_keys_and_values_are_separated() -> None:
    tensors = {"blk.0.attn_qkv.weight": (16, 8), "blk.0.attn_qkv.bias": (16,)}
    fields = {"attention.head_count_kv": 1}

    found = read_tensors(file_with("llama", tensors, **fields))

    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    rows = [found[name].sources[0].rows for name in names]
    assert rows == [range(8), range(8, 12), range(12, 16)]
    assert found[names[0]].shape == (8, 8)
    assert found[names[0]].row_order() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert found[names[2].replace("weight", "bias")].shape == (4,)


def test_rounds_of_heads_become_groups() -> None:
    order = groups_from_rounds(2, 6, first=1)

    # Stored: one row of others, then heads 0, 3, 1, 4, 2, 5 with two rows each.
    assert order(13) == [0, 1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12]


@pytest.mark.parametrize(
    ("architecture", "tensors", "match"),
    [
        ("deepseek2", {"blk.0.attn_k_b.weight": (6,)}, "a first dimension of experts or heads"),
        ("qwen3moe", {"blk.0.ffn_up_exps.weight": (1 << 20, 2, 2)}, "at most 16384"),
        (
            "deepseek2",
            {"blk.0.attn_k_b.weight": (2, 6, 4), "blk.0.attn_v_b.weight": (2, 5, 7)},
            "'blk.0.attn_v_b.weight' has the shape .*, which does not fit 'blk.0.attn_k_b.weight'",
        ),
        ("llama", {"blk.1.nextn.eh_proj.weight": (8, 8)}, "which Baton does not know"),
        ("chatglm", {"blk.0.attn_qkv.weight": (23, 8)}, "has 23 rows; .* requires 8 \\+ 8 \\+ 8"),
        ("bert", {}, "has the architecture 'bert', which Baton does not read from GGUF"),
    ],
)
def test_what_does_not_fit_is_refused(architecture: str, tensors: Shapes, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_tensors(file_with(architecture, tensors))


def test_layers_that_predict_tokens_are_read_but_for_unknown_tensors() -> None:
    tensors: dict[str, tuple[int, ...]] = {
        "blk.0.attn_norm.weight": (8,),
        "blk.1.nextn.eh_proj.weight": (8, 16),
        "blk.1.nextn.embed_tokens.weight": (9, 8),  # a copy of the model's
    }
    fields = {"block_count": 2, "nextn_predict_layers": 1}

    found = read_tensors(file_with("glm4moe", tensors, **fields))

    assert set(found) == {"model.layers.0.input_layernorm.weight", "model.layers.1.eh_proj.weight"}


def test_a_claimed_number_of_layers_is_not_listed() -> None:
    fields = {
        "block_count": 1 << 40,
        "attention.key_length": 4,
        "ssm.inner_size": 4,
        "ssm.time_step_rank": 2,
    }

    config = read_config(file_with("qwen35", {"token_embd.weight": (9, 8)}, **fields))

    assert config.get("layer_types") == ["linear_attention"]


@pytest.mark.parametrize(("experts", "expected"), [(160, (8, 3)), (256, (8, 4)), (64, (1, 1))])
def test_early_files_of_deepseek_have_the_groups_of_their_model(
    experts: int, expected: tuple[int, int]
) -> None:
    fields = {
        "rope.dimension_count": 2,
        "attention.key_length": 6,
        "attention.value_length": 4,
        "expert_count": experts,
    }

    config = read_config(file_with("deepseek2", {"token_embd.weight": (9, 8)}, **fields))

    assert (config.get("n_group"), config.get("topk_group")) == expected
    assert (config.get("qk_nope_head_dim"), config.get("v_head_dim")) == (4, 4)


def test_windows_of_llama4_are_those_that_llamacpp_has() -> None:
    fields = {"expert_count": 16, "attention.sliding_window": 0}

    with pytest.raises(ModelError, match="sliding_window' is 0; it must be 8192"):
        read_config(file_with("llama4", {"token_embd.weight": (9, 8)}, **fields))
