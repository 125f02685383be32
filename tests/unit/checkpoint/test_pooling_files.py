"""Pooling of model folders and GGUF files: forms that are read, and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.gguf.generation import read_pooling as read_gguf_pooling
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.header import Header
from baton.checkpoint.pooling_files import read_pooling
from baton.core.errors import ModelError
from baton.core.pooling import DenseLayer, Pooling, PoolingKind

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


def write(folder: Path, modules: object, config: object = None) -> Path:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, PoolingKind.MEAN),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 384}, PoolingKind.CLS),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, PoolingKind.LAST),
        ({"pooling_mode": "lasttoken"}, PoolingKind.LAST),
    ],
)
@pytest.mark.parametrize("normalizes", [True, False])
def test_forms(tmp_path: Path, config: dict[str, Any], kind: PoolingKind, normalizes: bool) -> None:
    modules = [TRANSFORMER, POOLING, *([NORMALIZE] if normalizes else [])]

    assert read_pooling(write(tmp_path, modules, config)) == Pooling(kind, normalizes)


def test_a_folder_without_modules_is_no_embedder(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None


MEAN = {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("modules", "config", "expected"),
    [
        ({"0": TRANSFORMER}, MEAN, "not a JSON list"),
        ([1], MEAN, "not a JSON list"),
        ([TRANSFORMER], MEAN, "no module of the type Pooling"),
        ([TRANSFORMER, POOLING, {"type": "a.LSTM", "path": "2"}], MEAN, "LSTM"),
        ([{**POOLING, "path": "../1_Pooling"}], MEAN, "path"),
        ([{**POOLING, "path": ""}], MEAN, "path"),
        ([{**POOLING, "path": "none"}], MEAN, "missing"),
        ([POOLING], [], "not a JSON object"),
        ([POOLING], {}, "missing"),
        ([POOLING], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ([POOLING], {**MEAN, "pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        ([POOLING], {"pooling_mode": "max"}, "pooling_mode"),
        ([POOLING], {"pooling_mode_mean_tokens": 1}, "pooling_mode_mean_tokens"),
        ([POOLING], {**MEAN, "include_prompt": False}, "include_prompt"),
    ],
)
def test_faulty_folders(tmp_path: Path, modules: object, config: object, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        read_pooling(write(tmp_path, modules, config))


DENSE = {"type": "pylate.models.Dense.Dense", "path": "2_Dense"}
IDENTITY = "torch.nn.modules.linear.Identity"
PROJECTION = {"in_features": 8, "out_features": 4, "activation_function": IDENTITY}


def with_dense(folder: Path, modules: object, config: object) -> Path:
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
    return write(folder, modules, MEAN)


def test_dense_layers(tmp_path: Path) -> None:
    plain, tanh = tmp_path / "plain", tmp_path / "tanh"
    plain.mkdir()
    tanh.mkdir()

    found = read_pooling(with_dense(plain, [TRANSFORMER, DENSE], {**PROJECTION, "bias": False}))
    other = read_pooling(
        with_dense(tanh, [TRANSFORMER, POOLING, DENSE], {"in_features": 8, "out_features": 8})
    )

    assert found == Pooling(PoolingKind.TOKENS, dense=(DenseLayer("2_Dense", 8, 4),))
    layer = DenseLayer("2_Dense", 8, 8, has_bias=True, has_tanh=True)
    assert other == Pooling(PoolingKind.MEAN, normalizes=False, dense=(layer,))


@pytest.mark.parametrize(
    ("module", "config", "expected"),
    [
        ({**DENSE, "path": "../2_Dense"}, PROJECTION, "path"),
        ({**DENSE, "path": "other"}, PROJECTION, "other/config.json is missing"),
        (DENSE, [], "not a JSON object"),
        (DENSE, {"in_features": 8}, "out_features"),
        (DENSE, {**PROJECTION, "in_features": 1 << 40}, "in_features"),
        (DENSE, {**PROJECTION, "bias": "no"}, "bias"),
        (DENSE, {**PROJECTION, "activation_function": "torch.nn.ReLU"}, "activation_function"),
        (DENSE, {**PROJECTION, "use_residual": True}, "use_residual"),
    ],
)
def test_faulty_dense_layers(tmp_path: Path, module: object, config: object, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        read_pooling(with_dense(tmp_path, [TRANSFORMER, module], config))


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, None])
def test_faulty_folders_of_colbert(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["HF_ColBERT"]}))
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ModelError, match=r"has no matrix linear\.weight"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_gguf(number: int, kind: str) -> None:
    assert read_gguf_pooling(gguf(number)) == Pooling(PoolingKind(kind))


def test_gguf_without_pooling_and_with_an_unknown_one() -> None:
    assert read_gguf_pooling(gguf(None)) is None
    assert read_gguf_pooling(gguf(0)) is None
    with pytest.raises(ModelError, match=r"qwen3.pooling_type.*is 4"):
        read_gguf_pooling(gguf(4))


def gguf(number: int | None) -> GgufFile:
    pooling: dict[str, Any] = {} if number is None else {"qwen3.pooling_type": number}
    metadata: dict[str, Any] = {"general.architecture": "qwen3", **pooling}
    return GgufFile([Header(Path("a.gguf"), metadata, {})])
