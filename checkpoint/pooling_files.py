"""Pooling of a model folder, as `sentence-transformers` stores it: modules.json and its folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from baton.checkpoint.json_fields import JsonFields, read_model_text
from baton.checkpoint.model_files import is_plain_name
from baton.core.errors import ModelError
from baton.core.pooling import Pooling, PoolingKind

MODULES = "modules.json"
CONFIG = "config.json"
LIMITS = "sentence_bert_config.json"
FLAGS = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
NAMES = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling of an embedder, or None for a folder without modules.json."""
    path = folder / MODULES
    if not path.exists():
        return None
    kind, normalizes = None, False
    for module in _modules(path):
        name = str(module.get("type")).rpartition(".")[2]
        if name == "Pooling":
            kind = _read_kind(folder, module)
        elif name == "Normalize":
            normalizes = True
        elif name != "Transformer":
            raise module.wrong("type", "must be Transformer, Pooling or Normalize")
    if kind is None:
        raise ModelError(f"{path} has no module of the type Pooling; fetch the folder again")
    return Pooling(kind, normalizes)


def read_max_text_len(folder: Path) -> int | None:
    """Return the limit of sentence_bert_config.json in tokens, if there is one."""
    path = folder / LIMITS
    if not path.exists():
        return None
    fields = JsonFields.read(path)
    return fields.positive_int("max_seq_length") if fields.has("max_seq_length") else None


def _modules(path: Path) -> Iterator[JsonFields]:
    try:
        modules = json.loads(read_model_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelError(f"{path} is not a JSON list of objects; fetch it again")
    for index, module in enumerate(modules):
        yield JsonFields(f"{path}: module {index}", module)


def _read_kind(folder: Path, module: JsonFields) -> PoolingKind:
    name = str(module.get("path"))
    if not is_plain_name(name):
        raise module.wrong("path", "must be the name of a folder in the model's folder")
    fields = JsonFields.read(folder / name / CONFIG)
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
