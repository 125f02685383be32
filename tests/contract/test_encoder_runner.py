"""The runner of encoders: plans, retries, hooks, and errors of folders and settings by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from baton.core.errors import InvalidConfig, ModelError
from baton.core.ids import RequestId
from baton.core.request import EMBED, GENERATE, Task
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.errors import OutOfOrder
from baton.engine.factory import build_scheduler
from baton.engine.kv_cache.groups import NO_MEMORY
from baton.engine.plan import Plan, PlanRow, RunResult
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.loaded_runner import LoadedRunner
from baton.engine.runner.model_info import NO_LAYER
from baton.engine.runner.open_runner import open_runner
from baton.engine.scheduler.validation import max_sequence_length
from baton.engine.spec_decode.config import Speculation
from baton.kv_transfer.fence import Fence
from tests.support.encoders import SIZES, make_encoder

LENGTHS = {"a": 5, "b": 9, "c": 5}
A, B, C = map(RequestId, LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    make_encoder(folder, "bert")
    return folder


def load(folder: Path, **settings: Any) -> LoadedRunner:
    settings = {"dtype": "float32", "pooling": "mean", **settings}
    return open_runner(RunnerConfig(str(folder), max_num_seqs=4, **settings))


def row_of(name: str, task: Task = EMBED) -> PlanRow:
    tokens = tuple(range(10, 10 + LENGTHS[name]))
    return PlanRow(
        RequestId(name),
        tokens,
        len(tokens),
        0,
        (),
        SamplingParams(),
        seed=0,
        task=task,
    )


def plan_of(*names: str, dropped: str = "", is_retry: bool = False) -> Plan:
    return Plan(
        dropped=tuple(map(RequestId, dropped)),
        started=tuple(map(row_of, names)),
        num_scheduled_tokens={RequestId(name): LENGTHS[name] for name in names},
        is_retry=is_retry,
    )


def run(runner: LoadedRunner, plan: Plan) -> RunResult:
    return runner.launch(plan).collect()


def test_a_text_has_one_vector_in_any_batch(folder: Path) -> None:
    with load(folder) as runner:
        together = run(runner, plan_of("a", "b", "c")).vectors
        again = run(runner, plan_of("b", dropped="abc")).vectors
        after_retry = run(runner, plan_of("c", is_retry=True)).vectors

    assert together[A] == together[C]  # the same tokens
    for name, found in ((B, again), (C, after_retry)):
        vectors = [np.frombuffer(each[name], "<f4") for each in (together, found)]
        assert np.abs(vectors[0] - vectors[1]).max() < 1e-6


@pytest.mark.parametrize("row", [row_of("a", GENERATE), row_of("b")])
def test_parts_of_texts_and_answers_are_refused(row: PlanRow, folder: Path) -> None:
    plan = Plan(started=(row,), num_scheduled_tokens={row.request_id: 5})
    with load(folder) as runner, pytest.raises(OutOfOrder, match="computes whole texts"):
        runner.launch(plan)


class RecordingHook:
    def __init__(self) -> None:
        self.calls: list[int | str] = []

    def layer_done(self, layer: int, fence: Fence) -> None:
        self.calls.append(layer)

    def pass_done(self) -> None:
        self.calls.append("pass")


def test_layers_are_progress_and_no_kv(folder: Path) -> None:
    with load(folder) as runner:
        runner.hook = hook = RecordingHook()
        run(runner, plan_of("a"))

    assert hook.calls == [NO_LAYER] * SIZES["num_hidden_layers"] + ["pass"]


def test_an_encoder_has_neither_a_kv_cache_nor_blocks(folder: Path) -> None:
    with load(folder) as runner:
        assert runner.kv_memory is None
        scheduler = build_scheduler(runner, EngineOptions(collect_kv_events=True))

    cache = scheduler.cache_config
    assert (cache.layout, cache.num_blocks, scheduler.stats_by_group()) == (NO_MEMORY, 0, {})
    assert max_sequence_length(scheduler.config, cache) == 130


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"max_model_len": 131}, "at most 130"),
    "speculation": ({"speculation": Speculation(4)}, "generates nothing"),
    "int8 KV": ({"kv_cache_dtype": "int8"}, "no KV cache"),
    "native": ({"kernels": "native", "dtype": "float16"}, "bfloat16 on the CPU"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_do_not_fit(name: str, folder: Path) -> None:
    settings, message = SETTINGS[name]
    with pytest.raises(InvalidConfig, match=message):
        load(folder, **settings)


FIELDS: dict[str, tuple[str, object, str]] = {
    "heads": ("num_attention_heads", 5, "heads of an even size"),
    "layers": ("num_hidden_layers", 10_001, "at most 10000"),
    "activation": ("hidden_act", "relu", "must be one of gelu"),
    "positions": ("position_embedding_type", "relative_key", "changes the computation"),
    "decoder": ("is_decoder", True, "changes the computation"),
    "quantized": ("quantization_config", {"quant_method": "gptq"}, "changes the computation"),
    "types": ("type_vocab_size", "two", "must be a number"),
    "architecture": ("architectures", ["BertLMHeadModel"], "is not known to Baton itself"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_are_not_supported(name: str, folder: Path, tmp_path: Path) -> None:
    field, value, message = FIELDS[name]
    copy = copy_folder(folder, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ModelError, match=message):
        load(copy)


def test_a_function_of_scores_that_is_not_supported(tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert", "ForSequenceClassification")
    config = json.loads((tmp_path / "config.json").read_text())
    fields = {**config, "sbert_ce_default_activation_function": "torch.nn.Tanh"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="must be Identity or Sigmoid"):
        load(tmp_path)


def copy_folder(folder: Path, target: Path) -> Path:
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (lambda tensors: tensors.pop("encoder.layer.1.output.dense.bias"), "lacks"),
    "unknown": (
        lambda tensors: tensors.update(extra=tensors["embeddings.LayerNorm.bias"].clone()),
        "does not use: extra",
    ),
    "shape": (
        lambda tensors: tensors.update(
            {"embeddings.LayerNorm.bias": tensors["embeddings.LayerNorm.bias"][:-1].clone()}
        ),
        "embeddings.LayerNorm.bias",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_do_not_fit(name: str, folder: Path, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    copy = copy_folder(folder, tmp_path)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(copy)


def test_a_limit_that_is_no_number(folder: Path, tmp_path: Path) -> None:
    copy = copy_folder(folder, tmp_path)
    (copy / "sentence_bert_config.json").write_text('{"max_seq_length": "long"}')
    with pytest.raises(ModelError, match="max_seq_length"):
        load(copy)
