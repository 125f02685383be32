"""Drafts of one decoder layer over a model's last hidden states, by transformers' own layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models import import_transformers, reference

Choose = Callable[[Tensor, int], int]  # (logits, position) -> token
Norm = Callable[[Tensor], Tensor]


def _no_norm(states: Tensor) -> Tensor:
    return states


@dataclass(slots=True)
class LayerReference:
    """Computes the whole text for each draft. The next step reads what the layer returns."""

    folder: Path  # of the model
    layer: Any  # a model that consists of this one layer
    projection: Tensor
    bias: Tensor | None = None
    embedding_norm: Norm = _no_norm
    state_norm: Norm = _no_norm
    output_norm: Norm = _no_norm  # in front of the LM head alone
    has_first_embedding: bool = True

    @torch.no_grad()
    def draft(self, token_ids: Sequence[int], k: int, choose: Choose) -> list[int]:
        model, tokens = reference(self.folder), list(token_ids)
        before = torch.tensor([tokens[:-1]])
        states = model(before, output_hidden_states=True).hidden_states[-1][0]
        for _ in range(k):
            embeddings = model.get_input_embeddings()(torch.tensor(tokens[1:]))
            if not self.has_first_embedding:
                embeddings[0] = 0
            both = torch.cat((self.embedding_norm(embeddings), self.state_norm(states)), dim=-1)
            projected = functional.linear(both, self.projection, self.bias)
            output = self.layer(inputs_embeds=projected[None], use_cache=False).last_hidden_state
            newest = output[0, -1:]
            tokens.append(choose(model.lm_head(self.output_norm(newest))[0], len(tokens)))
            states = torch.cat((states, newest))
        return tokens[len(token_ids) :]


def eagle_reference(model: Path, head: Path) -> LayerReference:
    """Return the reference of an EAGLE head: its layer, without norms that its folder lacks."""
    config = json.loads((head / "config.json").read_text())
    fields, tensors = config, load_file(head / "model.safetensors")
    prefix, projection = "layers.0.", "fc"
    if "speculators_model_type" in config:
        fields, prefix, projection = config["transformer_layer_config"], "transformer.", "fusion_fc"
    transformers = import_transformers()
    has_bias = fields.get("qkv_bias", False)
    llama = transformers.LlamaConfig(**{**fields, "attention_bias": has_bias})
    layer = transformers.LlamaModel(llama).eval()
    layer.norm = nn.Identity()
    [decoder] = layer.layers
    own = {name: each for name, each in tensors.items() if name.startswith(prefix)}
    if f"{prefix}input_layernorm.weight" not in own:
        decoder.input_layernorm = nn.Identity()
    own = {name.removeprefix(prefix): each for name, each in own.items()}
    missing, unexpected = decoder.load_state_dict(own, strict=False)
    assert not unexpected
    assert set(missing) <= {"self_attn.o_proj.bias"}
    if has_bias:
        decoder.self_attn.o_proj.bias.data.zero_()

    def norm(name: str) -> Norm:
        weight = tensors.get(f"{name}.weight")
        if weight is None:
            return _no_norm
        return lambda states: functional.rms_norm(states, weight.shape, weight, llama.rms_norm_eps)

    return LayerReference(
        model,
        layer,
        tensors[f"{projection}.weight"],
        tensors.get(f"{projection}.bias"),
        embedding_norm=norm("embedding_layernorm"),
        output_norm=norm("pre_lm_head_layernorm"),
    )
