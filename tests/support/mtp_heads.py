"""Models with a layer for multi-token prediction, and drafts of it by transformers' own layers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.support.layer_reference import LayerReference
from tests.support.models import Variant, import_transformers, make_model_folder

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Form:
    """Names in files, and what the families do differently."""

    layer: str  # of a model of {n} layers
    own: str
    projection: str
    embedding_norm: str
    state_norm: str
    norm: str
    has_first_embedding: bool
    norm_offset: float

    @property
    def norms(self) -> tuple[str, ...]:
        return self.embedding_norm, self.state_norm, self.norm


AFTER_LAST = Form(
    *("model.layers.{n}.", "model.layers.{n}.", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
    has_first_embedding=False,
    norm_offset=0.0,
)
QWEN = Form(
    *("mtp.layers.0.", "mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    has_first_embedding=True,
    norm_offset=1.0,
)


def form_of(variant: Variant) -> Form:
    return QWEN if variant.family.startswith("Qwen") else AFTER_LAST


def make_mtp_folder(folder: Path, variant: Variant, num_layers: int) -> Path:
    """Write a model of `num_layers` layers, and one more that predicts several tokens."""
    form = form_of(variant)
    settings = {**variant.settings, "num_hidden_layers": num_layers + 1}
    if form is QWEN:  # the layer has attention, as the one before it
        kinds = ["linear_attention"] * (num_layers - 1) + ["full_attention"]
        settings["layer_types"] = [*kinds, "full_attention"]
    make_model_folder(folder, replace(variant, settings=settings))
    config = _change(folder, num_layers)
    tensors, hidden = load_file(folder / WEIGHTS), config["hidden_size"]
    layer = f"model.layers.{num_layers}."
    renamed = form.layer.format(n=num_layers)
    tensors = {name.replace(layer, renamed): each for name, each in tensors.items()}
    random, own = torch.Generator().manual_seed(5), form.own.format(n=num_layers)
    for name in form.norms:
        norm = 0.2 * torch.randn(hidden, generator=random)
        tensors[f"{own}{name}.weight"] = 1 - form.norm_offset + norm
    projection = torch.randn(hidden, 2 * hidden, generator=random) / hidden
    tensors[f"{own}{form.projection}.weight"] = projection
    if form is AFTER_LAST:
        tensors[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def _change(folder: Path, num_layers: int) -> Any:
    """Give the configuration another number of layers, and return it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    if config.get("layer_types"):
        kinds = [*config["layer_types"], "full_attention"]
        config["layer_types"] = kinds[:num_layers]
    if "mlp_layer_types" in config:
        kinds = [*config["mlp_layer_types"], "sparse"]
        config["mlp_layer_types"] = kinds[:num_layers]
    path.write_text(json.dumps(config))
    return config


def mtp_reference(folder: Path, whole: Path, form: Form) -> LayerReference:
    """Return the reference. `whole` is a folder for these tensors as a model of one layer more."""
    config = json.loads((folder / "config.json").read_text())
    n, tensors = config["num_hidden_layers"], load_file(folder / WEIGHTS)
    prefix, own = form.layer.format(n=n), form.own.format(n=n)
    names = (*form.norms, form.projection)
    parts = {name: tensors.pop(f"{own}{name}.weight") for name in names}
    copies = ("embed_tokens", "shared_head.head")
    plain = {
        name.replace(prefix, f"model.layers.{n}."): each
        for name, each in tensors.items()
        if name not in [f"{own}{copy}.weight" for copy in copies]
    }
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(config))
    _change(whole, n + 1)
    save_file(plain, whole / WEIGHTS, metadata={"format": "pt"})
    layer = import_transformers().AutoModelForCausalLM.from_pretrained(whole).eval().model
    layer.layers = layer.layers[n:]
    layer.norm.weight.data.copy_(parts[form.norm])
    layer.config.num_hidden_layers = 1
    epsilon = layer.config.rms_norm_eps
    return LayerReference(
        folder,
        layer,
        parts[form.projection],
        embedding_norm=partial(_norm, parts[form.embedding_norm] + form.norm_offset, epsilon),
        state_norm=partial(_norm, parts[form.state_norm] + form.norm_offset, epsilon),
        has_first_embedding=form.has_first_embedding,
    )


def _norm(weight: Tensor, epsilon: float, states: Tensor) -> Tensor:
    return functional.rms_norm(states, weight.shape, weight, epsilon)
