"""Model loading: valid folders load completely, invalid ones raise an error with the reason."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.checkpoint.checkpoint import GenerationDefaults
from baton.checkpoint.hub import resolve_model
from baton.checkpoint.model_files import read_generation_defaults
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.weight_files import PickledFile
from baton.core.errors import InvalidConfig, ModelError
from baton.core.sampling import SamplingDefaults
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.runner.attention.kv_tensor import num_blocks_within
from baton.engine.runner.device.host_memory import free_host_bytes
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model.config import ModelConfig, RopeConfig
from baton.engine.runner.model_info import LoadProgress
from tests.support.models import VARIANTS, make_model_folder

BUDGET = 1 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "llama-mha-biased-sharded", "llama-tied-mqa")
    return {
        name: make_model_folder(tmp_path_factory.mktemp(name), VARIANTS[name]) for name in names
    }


@pytest.fixture
def folder(made: dict[str, Path], tmp_path: Path) -> Path:
    """Return a valid folder that the test may damage."""
    return Path(shutil.copytree(made["llama"], tmp_path / "llama"))


@pytest.fixture
def sharded(made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made["llama-mha-biased-sharded"], tmp_path / "sharded"))


def load(folder: Path, **settings: Any) -> Any:
    return load_runner(RunnerConfig(str(folder), **{"kv_cache_bytes": BUDGET, **settings}))


def rewrite(path: Path, change: Mapping[str, Any]) -> None:
    """Change fields of a JSON file; None removes a field."""
    fields = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def respell(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# --- good folders ------------------------------------------------------------------------


def test_load_progress_ends_at_100_percent(folder: Path) -> None:
    seen: list[LoadProgress] = []

    load_runner(RunnerConfig(str(folder), kv_cache_bytes=BUDGET), seen.append)

    loaded = [each.loaded_bytes for each in seen]
    assert loaded == sorted(loaded)
    assert loaded[-1] == seen[-1].total_bytes
    assert seen[-1].total_bytes == 4 * sum(
        tensor.numel() for tensor in load_file(folder / "model.safetensors").values()
    )


def test_the_fingerprint_depends_on_the_content_and_not_on_the_files(
    folder: Path, tmp_path: Path
) -> None:
    def fingerprint(at: Path, **settings: Any) -> str:
        return str(load(at, **settings).info.fingerprint)

    before = fingerprint(folder)
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert fingerprint(moved) == before

    respell(folder, stretch_norm)
    assert fingerprint(folder) != before
    rewrite(moved / "config.json", {"rms_norm_eps": 2e-6})
    assert fingerprint(moved) != before


def edit_one_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"][100, 7] += 1e-3


def edit_one_matrix(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][9, 50] *= -1.0


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("edit", [edit_one_embedding, edit_one_matrix])
def test_every_weight_is_part_of_the_fingerprint(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], None], quantize: str
) -> None:
    before = load(folder, quantize=quantize).info.fingerprint

    respell(folder, edit)

    assert load(folder, quantize=quantize).info.fingerprint != before


def test_weights_that_change_during_the_load_are_refused(folder: Path) -> None:
    changes = [partial(respell, folder, edit_one_embedding)]

    def change_once(_: LoadProgress) -> None:
        if changes:
            changes.pop()()

    with pytest.raises(ModelError, match=r"model\.safetensors changed while it was loaded"):
        load_runner(RunnerConfig(str(folder), kv_cache_bytes=BUDGET), change_once)


def test_shards_give_the_same_model_as_one_file(sharded: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(sharded, whole, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {k: v for file in sharded.glob("*.safetensors") for k, v in load_file(file).items()}
    save_file(tensors, whole / "model.safetensors")

    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert load(whole).info.fingerprint == load(sharded).info.fingerprint


def test_unused_tensors_of_old_folders_are_ignored(folder: Path) -> None:
    respell(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        ),
    )

    assert load(folder).info.vocab_size == 320


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kv_cache_has_the_requested_dtype(folder: Path, dtype: str) -> None:
    with load(folder, dtype=dtype) as runner:
        assert runner.info.dtype == dtype
        assert runner.kv_memory.blocks.cache_dtype == dtype


# --- bad folders -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["RiddleForCausalLM"]}, "RiddleForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "large"}, "hidden_size.*large"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"dtype": "float8"}, "dtype.*float8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type.*spiral"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "factor.*missing"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping.*30"),
        ({"num_local_experts": 4}, "num_local_experts.*4"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor.*0.5"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_served_is_named(
    folder: Path, change: Mapping[str, Any], named: str
) -> None:
    rewrite(folder / "config.json", change)

    with pytest.raises(ModelError, match=f"config.json.*{named}"):
        load(folder)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff\xfe"])
def test_a_configuration_that_cannot_be_read_is_named(folder: Path, content: bytes | None) -> None:
    path = folder / "config.json"
    path.unlink() if content is None else path.write_bytes(content)

    with pytest.raises(ModelError, match=r"config\.json"):
        load(folder)


def stretch_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][-1] *= 1.001


def lack_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def widen_q(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(65, 64)


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def make_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lack_norm, r"lacks model\.norm\.weight"),
        (widen_q, r"layers\.1\.self_attn\.q_proj\.weight has the shape \(65, 64\).*\(64, 64\)"),
        (add_bias, r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"),
        (make_integers, r"model\.norm\.weight is I8"),
    ],
)
def test_tensors_with_a_wrong_shape_are_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    respell(folder, change)

    with pytest.raises(ModelError, match=named):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5_000, -1])
def test_a_truncated_weight_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(ModelError, match=r"model\.safetensors is corrupt or cut short"):
        load(folder)


def test_a_weight_file_of_something_else_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)

    with pytest.raises(ModelError, match=r"model\.safetensors is corrupt"):
        load(folder)


def test_a_folder_without_safetensors_is_refused_with_the_required_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.h5")

    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load(folder)


def pickle_weights(folder: Path, *, num_files: int = 1) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"pytorch_model-{i}.bin": names[i::num_files] for i in range(num_files)}
    if num_files == 1:
        files = {"pytorch_model.bin": names}
    for file, own in files.items():
        torch.save({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in files.items() for name in own}
    if num_files > 1:
        index = json.dumps({"weight_map": weight_map})
        (folder / "pytorch_model.bin.index.json").write_text(index)


@pytest.mark.parametrize("num_files", [1, 3])
def test_pickled_weights_are_those_of_safetensors(folder: Path, num_files: int) -> None:
    with SafetensorsFolder(folder).open_tensors() as files:
        expected = {name: files.tensor(name).clone() for name in files.names()}
        digest = files.digest()
    pickle_weights(folder, num_files=num_files)

    with SafetensorsFolder(folder).open_tensors() as files:
        assert files.names() == sorted(expected)
        assert all(torch.equal(files.tensor(name), each) for name, each in expected.items())
        assert files.digest() == digest  # so that nodes with either file are a pair
    load(folder)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": torch.zeros(2), "step": 3}, "'step' is no tensor"),
        ({"state_dict": {"a": torch.zeros(2)}}, "'state_dict' is no tensor"),
        ([torch.zeros(2)], "is no tensor"),
        ({"a": Runs()}, "is no file of tensors"),
    ],
    ids=["number", "nested", "list", "code"],
)
def test_pickles_of_other_things_are_refused_by_name(
    folder: Path, content: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match=message):
        load(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK", b"<html>not found</html>" * 100])
def test_a_damaged_pickle_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)

    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        load(folder)


def test_damaged_pickles_are_tensors_or_a_named_error(tmp_path: Path) -> None:
    whole, path = io.BytesIO(), tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(4, 4), "b": torch.ones(3)}, whole)
    with zipfile.ZipFile(whole) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    [pickled] = [name for name in files if name.endswith("data.pkl")]
    random = Random(5)
    num_refused = 0
    for _ in range(200):
        content = bytearray(files[pickled])
        for _ in range(random.randint(1, 5)):
            content[random.randrange(len(content))] = random.randrange(256)
        with zipfile.ZipFile(path, "w") as archive:
            for name, own in {**files, pickled: bytes(content)}.items():
                archive.writestr(name, own)
        try:
            with PickledFile(path) as found:
                names = list(found.keys())
                assert all(isinstance(found.get_tensor(name), torch.Tensor) for name in names)
        except ModelError:
            num_refused += 1
    assert num_refused > 100


def test_pickles_that_cannot_be_mapped_are_refused(folder: Path) -> None:
    pickle_weights(folder)
    path = folder / "pytorch_model.bin"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)

    with pytest.raises(ModelError, match="save it as safetensors"):
        load(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    lost = min(sharded.glob("model-*.safetensors"))
    lost.unlink()

    with pytest.raises(ModelError, match=lost.name):
        load(sharded)


def test_an_index_without_a_map_is_named(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")

    with pytest.raises(ModelError, match="weight_map"):
        load(sharded)


# --- what config.json means ------------------------------------------------------------------

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def config_of(at: Path, **change: Any) -> ModelConfig:
    (at / "config.json").write_text(json.dumps({**BASE, **change}))
    return read_model_config(SafetensorsFolder(at))


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig("linear", 5e5, 2.0, 512),
        ),
        (
            {
                "rope_theta": 7.0,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            },
            RopeConfig("linear", 5e5, 2.0, 512),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}},
            RopeConfig("yarn", 1e4, 8.0, 64),
        ),
    ],
    ids=str,
)
def test_both_spellings_of_rope_settings_are_read(
    tmp_path: Path, fields: Mapping[str, Any], rope: RopeConfig
) -> None:
    assert config_of(tmp_path, **fields).ropes == (rope,)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 3),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 3),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}, (None,) * 3),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 2,
            },
            (None, None, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
        ({"sliding_window": 9}, (None,) * 3),
    ],
    ids=str,
)
def test_sliding_windows_are_read_by_layer(
    tmp_path: Path, fields: Mapping[str, Any], windows: tuple[int | None, ...]
) -> None:
    layers = config_of(tmp_path, **fields).layers

    assert tuple(layer.window for layer in layers) == windows


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, GenerationDefaults((2,))),
        (
            {"temperature": 0.6, "top_k": 20},
            GenerationDefaults((2,), SamplingDefaults(0.6, top_k=20)),
        ),
        ({"eos_token_id": 5}, GenerationDefaults((5,))),
        ({"suppress_tokens": [7, 8]}, GenerationDefaults((2,), suppressed_token_ids=(7, 8))),
        (
            {"eos_token_id": [5, 6], "top_p": 0.9, "repetition_penalty": 1.1, "top_k": 0},
            GenerationDefaults((5, 6), SamplingDefaults(top_p=0.9, repetition_penalty=1.1)),
        ),
    ],
    ids=str,
)
def test_generation_defaults_and_end_tokens_are_read(
    tmp_path: Path, generation: Mapping[str, Any] | None, expected: GenerationDefaults
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))

    assert read_generation_defaults(tmp_path) == expected


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1 << 20, 3_333_333, 10_000_000])
def test_the_cache_is_within_one_percent_of_its_budget_and_never_above(
    folder: Path, budget: int
) -> None:
    with load(folder, kv_cache_bytes=budget) as runner:
        memory = runner.kv_memory

    assert 0.99 * budget <= memory.num_bytes <= budget
    assert memory.num_blocks * memory.block_bytes == memory.num_bytes
    # Two layers, K and V, two heads of 16, blocks of 16 tokens, four bytes each.
    assert memory.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert memory.num_tokens == memory.num_blocks * 16
    assert memory.blocks.layer_bytes * memory.blocks.num_layers == memory.block_bytes


def test_the_kv_cache_takes_the_configured_share_of_free_memory(folder: Path) -> None:
    free = free_host_bytes()

    with load(folder, kv_cache_bytes=None, kv_cache_share=0.001) as runner:
        num_bytes = runner.kv_memory.num_bytes

    # Other processes allocate and free memory meanwhile.
    assert num_bytes == pytest.approx(0.001 * free, rel=0.5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_cache_bytes": 100}, "holds no block"),
        ({"kv_cache_bytes": 1 << 50}, "kv_cache_bytes"),
        ({"kv_cache_bytes": 0}, "kv_cache_bytes"),
        ({"kv_cache_share": 1.5}, "kv_cache_share"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"device": "meta"}, "device 'meta'"),
        ({"block_size": 0}, "block-size"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_model_len": 513}, "max_model_len 513: at most 512"),
        ({"num_threads": 0}, "--threads"),
    ],
    ids=str,
)
def test_invalid_settings_are_named(folder: Path, settings: Mapping[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        load(folder, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_cache_bytes": 100}, "holds no block"),
        ({"kv_cache_bytes": 1 << 50}, "kv_cache_bytes"),
        ({"max_model_len": 513}, "max_model_len 513: at most 512"),
        ({"logits_processors": ("none-such",)}, "--logits-processors none-such"),
        ({"kernels": "native", "dtype": "float32"}, "kernels 'native'"),
    ],
    ids=str,
)
def test_settings_are_checked_before_weights_are_read(
    folder: Path, settings: Mapping[str, Any], named: str
) -> None:
    (folder / "model.safetensors").write_bytes(b"")

    with pytest.raises(InvalidConfig, match=named):
        load(folder, **settings)


def test_generation_defaults_are_checked_before_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "generation_config.json").write_text("{")

    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_missing_device_is_named(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="no such CUDA device"):
        load(folder, device="cuda")


def test_a_budget_is_filled_up_to_the_last_whole_block() -> None:
    assert num_blocks_within(1000, CacheLayout(), 100) == 10
    assert num_blocks_within(1099, CacheLayout(), 100) == 10


# --- where a model is ------------------------------------------------------------------------


def test_a_folder_path_is_returned_unchanged(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder


def test_offline_an_uncached_name_is_refused_with_the_searched_places() -> None:
    with pytest.raises(ModelError, match=r"no folder .*nobody/nothing.*cache.*offline"):
        resolve_model("nobody/nothing", offline=True)


def test_a_path_that_is_not_a_folder_is_not_taken_for_a_hub_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a folder or GGUF file on this machine"):
        resolve_model(str(tmp_path / "nothing"))


@pytest.fixture
def snapshot(folder: Path, tmp_path: Path) -> Path:
    """Return the model `maker/model`, laid out as in the cache of huggingface_hub."""
    repo = tmp_path / "hub" / "models--maker--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    return Path(shutil.copytree(folder, repo / "snapshots" / "abc"))


def test_a_cached_hub_name_needs_no_network(snapshot: Path, tmp_path: Path) -> None:
    found = resolve_model("maker/model", offline=True, cache=tmp_path / "hub")

    assert found == snapshot


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_an_incomplete_download_does_not_count_as_cached(
    snapshot: Path, tmp_path: Path, lost: str
) -> None:
    (snapshot / lost).unlink()

    with pytest.raises(ModelError, match=r"no model 'maker/model' in the Hugging Face cache"):
        resolve_model("maker/model", offline=True, cache=tmp_path / "hub")
