"""Conversion of model folders to GGUF for llama.cpp, with a stand-in for the writer of files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks.peers.workers.llamacpp_worker import (
    gguf_file,
    gguf_name,
    gguf_sources,
    write_gguf,
)
from tests.support.random_folders import small_folder

BF16 = "BF16"


class FakeGgufWriter:
    """Stand-in for gguf.GGUFWriter: keeps what it is given."""

    last: FakeGgufWriter

    def __init__(self, path: Path, architecture: str) -> None:
        self.architecture = architecture
        self.fields: dict[str, Any] = {}
        self.infos: dict[str, tuple[Sequence[int], str]] = {}
        self.values: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        FakeGgufWriter.last = self

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.fields.setdefault(name.removeprefix("add_"), values)

    def add_tensor_info(
        self, name: str, shape: Sequence[int], dtype: np.dtype[Any], size: int, kind: str = ""
    ) -> None:
        self.infos[name] = shape, kind or str(dtype)
        self._sizes[name] = size

    def write_tensor_data(self, values: np.ndarray[Any, Any]) -> None:
        name = list(self.infos)[len(self.values)]
        assert self._sizes[name] == values.nbytes
        self.values[name] = values


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SimpleNamespace(BF16=BF16)
    module = SimpleNamespace(GGUFWriter=FakeGgufWriter, GGMLQuantizationType=types)
    monkeypatch.setitem(sys.modules, "gguf", module)


def test_a_gguf_file_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")

    assert gguf_file({"model": str(path), "scratch": str(tmp_path), "weights": "q4_0"}) == path


def test_the_expert_matrices_are_stacked_into_one_tensor_in_order() -> None:
    names = [f"model.layers.3.mlp.experts.{at}.up_proj.weight" for at in (10, 9, 0)]

    assert gguf_sources([*names, "lm_head.weight"], ties_embeddings=False) == {
        "blk.3.ffn_up_exps.weight": names[::-1],
        "output.weight": ["lm_head.weight"],
    }
    assert gguf_sources(["lm_head.weight"], ties_embeddings=True) == {}


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.embed_tokens.weight", ("token_embd.weight", 0)),
        ("model.layers.1.mlp.gate.weight", ("blk.1.ffn_gate_inp.weight", 0)),
        ("model.layers.1.mlp.experts.7.gate_proj.weight", ("blk.1.ffn_gate_exps.weight", 7)),
        ("model.layers.1.mlp.experts.7.down_proj.weight", ("blk.1.ffn_down_exps.weight", 7)),
        ("model.layers.1.self_attn.q_norm.weight", ("blk.1.attn_q_norm.weight", 0)),
    ],
)
def test_tensors_have_llamacpp_names(name: str, stored: tuple[str, int]) -> None:
    assert gguf_name(name) == stored


@pytest.mark.usefixtures("gguf")
def test_an_moe_model_is_written_with_its_experts(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model", "qwen3-30b-a3b", "bfloat16")

    write_gguf(folder, tmp_path / "out" / "model.gguf")

    written = FakeGgufWriter.last
    assert written.architecture == "qwen3moe"
    assert written.fields["expert_count"] == (8,)
    assert written.fields["expert_used_count"] == (2,)
    assert written.fields["expert_feed_forward_length"] == (32,)
    assert written.infos["blk.0.ffn_gate_exps.weight"] == ([8, 32, 64], BF16)
    assert written.infos["blk.1.ffn_down_exps.weight"] == ([8, 64, 32], BF16)
    assert written.infos["blk.1.ffn_gate_inp.weight"] == ([8, 64], "float32")
    assert written.infos["output_norm.weight"] == ([64], "float32")
    assert list(written.values) == list(written.infos)
    with safe_open(folder / "model.safetensors", "pt") as file:
        expert = file.get_tensor("model.layers.1.mlp.experts.5.up_proj.weight")
    stacked = torch.from_numpy(written.values["blk.1.ffn_up_exps.weight"])
    assert torch.equal(stacked[5].view(torch.bfloat16), expert)


@pytest.mark.usefixtures("gguf")
def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    folder = small_folder(tmp_path, "mixtral-8x7b")

    with pytest.raises(SystemExit, match="not mixtral"):
        write_gguf(folder, tmp_path / "model.gguf")
