"""Models with a layer for multi-token prediction, and drafts of it by transformers' own layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.support.models import Variant, import_transformers, make_model_folder, reference

NORMS = ("enorm", "hnorm", "shared_head.norm")
WEIGHTS = "model.safetensors"
Choose = Callable[[Tensor, int], int]  # (logits, position) -> token


def make_mtp_folder(folder: Path, variant: Variant, num_layers: int) -> Path:
    """Write a model of `num_layers` layers, and one more that predicts several tokens."""
    settings = {**variant.settings, "num_hidden_layers": num_layers + 1}
    make_model_folder(folder, replace(variant, settings=settings))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config))
    tensors, hidden = load_file(folder / WEIGHTS), config["hidden_size"]
    random, prefix = torch.Generator().manual_seed(5), f"model.layers.{num_layers}."
    for name in NORMS:
        norm = 1 + 0.2 * torch.randn(hidden, generator=random)
        tensors[f"{prefix}{name}.weight"] = norm
    projection = torch.randn(hidden, 2 * hidden, generator=random) / hidden
    tensors[f"{prefix}eh_proj.weight"] = projection
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@dataclass(slots=True)
class MtpReference:
    """Computes the whole text for each draft."""

    folder: Path
    layer: Any  # a model that consists of this one layer
    own: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path, whole: Path) -> MtpReference:
        """`whole` is a folder for the same tensors as a model with one layer more."""
        config = json.loads((folder / "config.json").read_text())
        index, tensors = config["num_hidden_layers"], load_file(folder / WEIGHTS)
        prefix = f"model.layers.{index}."
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if prefix in name}
        extra = tuple(f"{prefix}{name}" for name in (*NORMS, "eh_proj", "embed_tokens", "shared_"))
        plain = {name: each for name, each in tensors.items() if not name.startswith(extra)}
        whole.mkdir()
        changed = {**config, "num_hidden_layers": index + 1}
        (whole / "config.json").write_text(json.dumps(changed))
        save_file(plain, whole / WEIGHTS, metadata={"format": "pt"})
        layer = import_transformers().AutoModelForCausalLM.from_pretrained(whole).eval().model
        layer.layers = layer.layers[index:]
        layer.norm.weight.data.copy_(own["shared_head.norm.weight"])
        layer.config.num_hidden_layers = 1
        return cls(folder, layer, own)

    @torch.no_grad()
    def draft(self, token_ids: Sequence[int], k: int, choose: Choose) -> list[int]:
        model, tokens = reference(self.folder), list(token_ids)
        before = torch.tensor([tokens[:-1]])
        states = model(before, output_hidden_states=True).hidden_states[-1][0]
        for _ in range(k):
            embeddings = model.get_input_embeddings()(torch.tensor(tokens[1:]))
            embeddings[0] = 0
            both = (self._norm("enorm", embeddings), self._norm("hnorm", states))
            projected = functional.linear(torch.cat(both, dim=-1), self.own["eh_proj.weight"])
            output = self.layer(inputs_embeds=projected[None], use_cache=False).last_hidden_state
            newest = output[0, -1:]
            tokens.append(choose(model.lm_head(newest)[0], len(tokens)))
            states = torch.cat((states, newest))
        return tokens[len(token_ids) :]

    def _norm(self, name: str, states: Tensor) -> Tensor:
        weight = self.own[f"{name}.weight"]
        epsilon = self.layer.config.rms_norm_eps
        return functional.rms_norm(states, weight.shape, weight, epsilon)
