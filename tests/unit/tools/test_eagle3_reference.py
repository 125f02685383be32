"""The reference for EAGLE-3 drafts reads each trainer's form, and each option does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.eagle3_reference import Eagle3Config, Eagle3Reference

VOCAB, DRAFTED, SIZE, NUM_TOKENS = 29, 20, 16, 9
LAYER: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
}
PLAIN = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
ATTENTION = "midlayer.self_attn"


def some_tensors(target_size: int = SIZE, num_taps: int = 3) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(4)
    shapes = {
        "fc": (SIZE, num_taps * target_size),
        **{
            f"{ATTENTION}.{name}_proj": (rows, 2 * SIZE)
            for name, rows in zip("qkv", (32, 16, 16), strict=True)
        },
        f"{ATTENTION}.o_proj": (SIZE, 32),
        "midlayer.mlp.gate_proj": (24, SIZE),
        "midlayer.mlp.up_proj": (24, SIZE),
        "midlayer.mlp.down_proj": (SIZE, 24),
        "midlayer.input_layernorm": (SIZE,),
        "midlayer.hidden_norm": (SIZE,),
        "midlayer.post_attention_layernorm": (SIZE,),
        "norm": (SIZE,),
        "lm_head": (DRAFTED, SIZE),
    }
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=random) * 0.5 + float(len(shape) == 1)
        for name, shape in shapes.items()
    }
    chosen = torch.randperm(VOCAB, generator=random)[:DRAFTED].sort().values
    return {**tensors, "d2t": chosen - torch.arange(DRAFTED)}


def a_scale(place: int, size: int = SIZE) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(place)) + 0.5


def rms(states: Tensor) -> Tensor:
    normed: Tensor = (
        states / (states.pow(2).mean(dim=-1, keepdim=True) + LAYER["rms_norm_eps"]).sqrt()
    )
    return normed


class Drafting:
    """Logits of four drafts of a head, for a fixed text."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], taps: list[Tensor] | None = None
    ) -> None:
        random = torch.Generator().manual_seed(5)
        embeddings = torch.randn(VOCAB, SIZE, generator=random)
        token_ids = torch.randint(VOCAB, (NUM_TOKENS + 1,), generator=random).tolist()
        reference = Eagle3Reference(Eagle3Config.parse(config), tensors, embeddings)
        self.logits: list[Tensor] = []
        self.positions: list[int] = []
        self.drafts = reference.draft(taps or some_taps(), token_ids, 4, self._choose)

    def _choose(self, logits: Tensor, position: int) -> int:
        self.logits.append(logits)
        self.positions.append(position)
        return int(logits.argmax())

    def is_like(self, other: Drafting, num_drafts: int = 4) -> bool:
        pairs = zip(self.logits[:num_drafts], other.logits[:num_drafts], strict=True)
        return all(torch.allclose(one, another, atol=1e-4) for one, another in pairs)


def some_taps(size: int = SIZE, count: int = 3) -> list[Tensor]:
    random = torch.Generator().manual_seed(6)
    return [torch.randn(NUM_TOKENS, size, generator=random) * (place + 1) for place in range(count)]


def test_drafts_are_of_the_draft_vocabulary_and_of_the_positions_after_the_text() -> None:
    tensors = some_tensors()
    found = Drafting(PLAIN, tensors)

    drafted = tensors["d2t"] + torch.arange(DRAFTED)
    assert set(found.drafts) <= {*drafted.tolist()}
    assert found.positions == [10, 11, 12, 13]
    # The same head that knows the whole vocabulary, with tokens that are never chosen.
    whole = torch.zeros(VOCAB, SIZE).index_copy(0, drafted, tensors["lm_head.weight"])
    del tensors["d2t"]
    other = Drafting(PLAIN, {**tensors, "lm_head.weight": whole})
    for one, another in zip(found.logits, other.logits, strict=True):
        assert torch.allclose(one[drafted], another[drafted], atol=1e-5)


def test_a_later_draft_reads_the_layers_output_before_or_after_the_final_norm() -> None:
    tensors = some_tensors(num_taps=1)
    tensors["fc.weight"] = torch.eye(SIZE)
    one_tap = {**PLAIN, "num_aux_hidden_states": 1}
    plain = Drafting(one_tap, tensors, some_taps(count=1))
    post_norm = Drafting({**one_tap, "norm_output": True}, tensors, some_taps(count=1))

    assert plain.is_like(post_norm, num_drafts=1)
    assert not torch.allclose(plain.logits[1], post_norm.logits[1], atol=1e-2)
    # A final norm that changes the length alone has no effect where the layer removes the length.
    tensors["norm.weight"] = torch.full((SIZE,), 3.0)
    before = Drafting({**one_tap, "norm_before_residual": True}, tensors, some_taps(count=1))
    after = Drafting(
        {**one_tap, "norm_before_residual": True, "norm_output": True}, tensors, some_taps(count=1)
    )
    assert before.is_like(after)


def test_a_norm_before_fc_covers_all_taps_and_fc_norm_each_one() -> None:
    tensors, taps = some_tensors(), some_taps()
    scale = a_scale(0, 3 * SIZE)
    scales = [a_scale(place) for place in range(3)]
    joined = rms(torch.cat(taps, dim=-1)) * scale
    each = [rms(tap) * one for tap, one in zip(taps, scales, strict=True)]

    before_fc = Drafting(
        {**PLAIN, "eagle_config": {"norm_before_fc": True}}, {**tensors, "input_norm.weight": scale}
    )
    per_tap = Drafting(
        {**PLAIN, "fc_norm": True},
        {**tensors, **{f"fc_norm.{place}.weight": one for place, one in enumerate(scales)}},
    )

    assert before_fc.is_like(Drafting(PLAIN, tensors, [*joined.chunk(3, dim=-1)]))
    assert per_tap.is_like(Drafting(PLAIN, tensors, each))
    assert not before_fc.is_like(per_tap)


def test_the_residual_is_the_state_itself_or_its_norm() -> None:
    tensors, states = some_tensors(num_taps=1), some_taps(count=1)
    tensors["fc.weight"] = torch.eye(SIZE)
    tensors["midlayer.hidden_norm.weight"] = torch.ones(SIZE)
    one_tap = {**PLAIN, "num_aux_hidden_states": 1}
    normed = {**one_tap, "norm_before_residual": True}

    # A state of unit length is its own norm.
    plain = Drafting(one_tap, tensors, [rms(states[0])])
    assert plain.is_like(Drafting(normed, tensors, states), num_drafts=1)
    assert not plain.is_like(Drafting(one_tap, tensors, states), num_drafts=1)


def test_biases_are_added() -> None:
    tensors = some_tensors()
    biases = {
        f"{ATTENTION}.{name}_proj.bias": a_scale(3, 32 if name == "q" else 16) for name in "qkvo"
    }
    config = {**PLAIN, "attention_bias": True}

    none = {name: torch.zeros_like(each) for name, each in biases.items()}
    assert Drafting(config, {**tensors, **none}).is_like(Drafting(PLAIN, tensors))
    for name, bias in biases.items():
        changed = Drafting(config, {**tensors, **none, name: bias})
        assert not changed.is_like(Drafting(PLAIN, tensors)), name


def test_targets_of_another_size_are_read() -> None:
    config = {**PLAIN, "target_hidden_size": 24, "num_aux_hidden_states": 2}
    tensors = some_tensors(target_size=24, num_taps=2)
    embeddings = torch.randn(VOCAB, SIZE)

    found = Drafting(config, {**tensors, "embed_tokens.weight": embeddings}, some_taps(24, 2))

    assert Eagle3Config.parse(config).target_hidden_size == 24
    assert len(found.drafts) == 4
    with pytest.raises(ValueError, match="reads 2"):
        Drafting(config, tensors, some_taps(24, 3))


def test_a_folder_of_speculators_is_read(tmp_path: Path) -> None:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**LAYER, "model_type": "llama"},
        "draft_vocab_size": DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [1, 5, 9],
        "norm_before_residual": False,
    }
    tensors = some_tensors()
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {name.replace("midlayer", "layers.0"): each for name, each in tensors.items()},
        tmp_path / "model.safetensors",
    )
    random = torch.Generator().manual_seed(5)
    embeddings = torch.randn(VOCAB, SIZE, generator=random)
    token_ids = torch.randint(VOCAB, (NUM_TOKENS + 1,), generator=random).tolist()

    reference = Eagle3Reference.read(tmp_path, embeddings)

    assert reference.tap_ids(32) == (1, 5, 9)
    assert Eagle3Reference(Eagle3Config.parse(PLAIN), tensors, embeddings).tap_ids(32) == (
        2,
        16,
        29,
    )
    assert reference.draft(some_taps(), token_ids, 4) == Drafting(PLAIN, tensors).drafts
    del config["norm_before_residual"]
    assert Eagle3Config.parse(config).norm_before_residual
    assert not Eagle3Config.parse(PLAIN).norm_before_residual
    with pytest.raises(ValueError, match="not an EAGLE-3 head"):
        Eagle3Config.parse({**PLAIN, "architectures": ["LlamaForCausalLM"]})
