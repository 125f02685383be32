"""Importance of columns: measured, checked, used by --quantize int4 and part of fingerprints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import InvalidConfig
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.layers import UnfusedLayer
from baton.engine.runner.model.linear import Mlp
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.weights.importance import read_importance
from tools.measure_importance import main, measure_importance

MODEL = "models/demo"
GATE = "model.layers.0.mlp.gate_proj"
NORM = "model.layers.0.input_layernorm"


def config(path: Path | str, quantize: str = "int4") -> RunnerConfig:
    return RunnerConfig(
        MODEL,
        dtype="float32",
        quantize=quantize,
        quantize_importance=str(path),
        kv_cache_bytes=1 << 20,
        max_model_len=32,
        max_num_seqs=1,
    )


def gate_products(runner: TorchRunner) -> list[Tensor]:
    assert isinstance(runner.decoder, Decoder)
    products = []
    for each in runner.decoder.layers:
        assert isinstance(each, UnfusedLayer)
        assert isinstance(each.layer.mlp, Mlp)
        products.append(each.layer.mlp.gate_up(torch.eye(256)[:3]))
    return products


def test_importance_is_the_mean_square_of_each_input() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 3, bias=False)
            self.lm_head = nn.Linear(3, 1)

        def forward(self, ids: Tensor) -> Tensor:
            numbers = torch.stack((ids.float(), torch.ones(ids.shape)), dim=-1)
            return torch.as_tensor(self.lm_head(self.inner(numbers)))

    found = measure_importance(Two(), [[1, 3], [5]])

    assert list(found) == ["inner"]
    assert torch.equal(found["inner"], torch.tensor([(1 + 9 + 25) / 3, 1.0]))


def test_the_tool_measures_every_matrix_of_a_model(tmp_path: Path) -> None:
    text, output = tmp_path / "text", tmp_path / "importance.safetensors"
    text.write_text("def add(first, second):\n    return first + second\n" * 9)

    main([MODEL, "--text", str(text), "--output", str(output), "--window", "16", "--windows", "2"])

    with open_checkpoint(MODEL).open_tensors() as tensors:
        shapes = tensors.shapes()
        found = read_importance(str(output), shapes)
    matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    assert matrices - set(found.columns) <= {"model.embed_tokens", "lm_head"}
    assert all(values.count_nonzero() for values in found.columns.values())


def test_importance_changes_the_named_matrices_and_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "importance.safetensors"
    fingerprints, products = set(), []
    for tensors in ({}, {GATE: torch.linspace(0, 9, 256)}, {GATE: torch.linspace(9, 0, 256)}):
        save_file(tensors, path)
        with load_runner(config(path if tensors else "")) as runner:
            fingerprints.add(runner.info.fingerprint)
            products.append(gate_products(runner))

    assert len(fingerprints) == 3
    for before, after in itertools.combinations(products, 2):
        is_same = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
        assert is_same == [False, *[True] * 3]


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"other": torch.ones(256)}, "'other': the model has no matrix of that name"),
        ({NORM: torch.ones(256)}, "layernorm': the model has no matrix of that name"),
        ({GATE: torch.ones(255)}, r"shape is \[255\], but the matrix has 256 columns"),
        ({GATE: -torch.ones(256)}, "finite and at least 0"),
        ({GATE: torch.full((256,), torch.inf)}, "finite and at least 0"),
        ({GATE: torch.full((256,), 1e300, dtype=torch.float64)}, "finite and at least 0"),
        ({GATE: torch.full((256,), torch.nan)}, "finite and at least 0"),
    ],
)
def test_importance_of_another_model_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], complaint: str
) -> None:
    path = tmp_path / "importance.safetensors"
    save_file(tensors, path)

    with pytest.raises(InvalidConfig, match=complaint):
        load_runner(config(path))


def _nothing(_: Path) -> None: ...


@pytest.mark.parametrize("write", [_nothing, Path.mkdir, lambda path: path.write_text("{}")])
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    write(tmp_path / "file")

    with pytest.raises(InvalidConfig, match=r"quantize-importance .*file cannot be read"):
        load_runner(config(tmp_path / "file"))


def test_importance_is_for_int4_alone() -> None:
    with pytest.raises(InvalidConfig, match="is for --quantize int4"):
        config("file", "int8")
