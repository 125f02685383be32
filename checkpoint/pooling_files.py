"""Pooling of a model folder, as `sentence-transformers` stores it: modules.json and its folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from baton.checkpoint.json_fields import JsonFields, read_model_text
from baton.checkpoint.model_files import SINGLE, is_plain_name
from baton.core.errors import ModelError
from baton.core.pooling import DenseLayer, Pooling, PoolingKind

MODULES = "modules.json"
CONFIG = "config.json"
FLAGS = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
COLBERT = "HF_ColBERT"  # architecture of folders of ColBERT's own library
PROJECTION = "linear.weight"
ACTIVATIONS = ("Identity", "Tanh")
NAMES = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling of an embedder, or None for a folder without modules.json.

    Without Pooling, but with Dense (as in PyLate's folders), each token has a vector.
    """
    path = folder / MODULES
    if not path.exists():
        return _read_colbert(folder)
    kind, normalizes = None, False
    dense: list[DenseLayer] = []
    for module in _modules(path):
        name = str(module.get("type")).rpartition(".")[2]
        if name == "Pooling":
            kind = _read_kind(folder, module)
        elif name == "Normalize":
            normalizes = True
        elif name == "Dense":
            dense.append(_read_dense(folder, module))
        elif name != "Transformer":
            raise module.wrong("type", "must be Transformer, Pooling, Dense or Normalize")
    if kind is None and not dense:
        raise ModelError(f"{path} has no module of the type Pooling; fetch the folder again")
    if kind is None:
        return Pooling(PoolingKind.TOKENS, dense=tuple(dense))
    return Pooling(kind, normalizes, dense=tuple(dense))


def _modules(path: Path) -> Iterator[JsonFields]:
    try:
        modules = json.loads(read_model_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelError(f"{path} is not a JSON list of objects; fetch it again")
    for index, module in enumerate(modules):
        yield JsonFields(f"{path}: module {index}", module)


def _read_colbert(folder: Path) -> Pooling | None:
    path = folder / CONFIG
    if not path.exists() or JsonFields.read(path).get("architectures") != [COLBERT]:
        return None
    from safetensors import SafetensorError, safe_open  # of folders with this architecture alone

    weights = folder / SINGLE
    try:
        with safe_open(weights, framework="numpy") as file:
            num_outputs, num_inputs = file.get_slice(PROJECTION).get_shape()
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{weights} has no matrix {PROJECTION} ({error}); fetch it again"
        ) from error
    return Pooling(PoolingKind.TOKENS, dense=(DenseLayer("", num_inputs, num_outputs),))


def _read_dense(folder: Path, module: JsonFields) -> DenseLayer:
    name, fields = _read_module(folder, module)
    activation = str(fields.get("activation_function") or "Tanh").rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise fields.wrong("activation_function", f"must be one of {', '.join(ACTIVATIONS)}")
    if fields.flag("use_residual", False):
        raise fields.wrong("use_residual", "must be false")
    return DenseLayer(
        name,
        fields.positive_int("in_features"),
        fields.positive_int("out_features"),
        has_bias=fields.flag("bias", True),
        has_tanh=activation == "Tanh",
    )


def _read_module(folder: Path, module: JsonFields) -> tuple[str, JsonFields]:
    """Return the folder of a module and its settings."""
    name = str(module.get("path"))
    if not is_plain_name(name):
        raise module.wrong("path", "must be the name of a folder in the model's folder")
    return name, JsonFields.read(folder / name / CONFIG)


def _read_kind(folder: Path, module: JsonFields) -> PoolingKind:
    _, fields = _read_module(folder, module)
    if not fields.flag("include_prompt", True):
        raise fields.wrong("include_prompt", "must be true: prompts are pooled with their texts")
    if fields.has("pooling_mode"):
        if fields.get("pooling_mode") not in NAMES:
            raise fields.wrong("pooling_mode", f"must be one of {', '.join(NAMES)}")
        return NAMES[str(fields.get("pooling_mode"))]
    chosen = [
        name
        for name in fields.names()
        if name.startswith("pooling_mode_") and fields.flag(name, False)
    ]
    if len(chosen) != 1 or chosen[0] not in FLAGS:
        raise ModelError(
            f"{fields.where}: the pooling is {', '.join(chosen) or 'missing'}; it must be one of "
            f"{', '.join(FLAGS)}"
        )
    return FLAGS[chosen[0]]
