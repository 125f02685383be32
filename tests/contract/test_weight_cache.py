"""Packed weights on disk: the next start computes the same bits, and damage is never used."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.core.errors import InvalidConfig, ModelError
from baton.engine.runner.config import weight_cache_folder
from baton.engine.runner.kernels import choose
from baton.engine.runner.kernels.build import VARIANTS as KERNEL_VARIANTS
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_info import LoadProgress
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.weights import packing_key, weight_cache
from baton.engine.runner.weights.tensor_loading import TensorLoader
from tests.support.gguf_files import write_gguf
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.packed_folders import FORMATS, write_quantized
from tests.support.random_folders import small_folder
from tests.support.runner_drivers import Driver, drives_of
from tests.support.triton_parts import require_triton

Answers = tuple[list[int], list[Any]]
NUM_TOKENS = 8
READ, WROTE = "Read the packed weights", "Wrote the packed weights"
WAITING = "Waiting for another process"

pytestmark = pytest.mark.skipif(not kernels_by_variant(), reason="no native kernels here")


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_key, "MIN_AGE_S", -1.0)
    monkeypatch.setattr(packing_key, "MIN_CACHED_BYTES", 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model of each way in which matrices are loaded."""
    root = tmp_path_factory.mktemp("models")
    shapes = ("deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b", "qwen3-next-80b-a3b")
    made = {name: small_folder(root / name, name, "bfloat16") for name in shapes}
    made["llama"] = make_model_folder(root / "llama", VARIANTS["llama"])
    made["gptq"], _ = write_quantized(made["llama"], root / "gptq", FORMATS["gptq-v2-ordered"])
    made["gguf"] = write_gguf(made["llama"], root / "model.gguf", "Q4_0").path
    return made


@pytest.fixture
def folder(models: dict[str, Path], tmp_path: Path) -> Path:
    """Return a model that the test may change."""
    return Path(shutil.copytree(models["llama"], tmp_path / "llama"))


@pytest.fixture
def waiting() -> Iterator[threading.Event]:
    """Yield an event that is set when a start waits for another one."""
    event, log = threading.Event(), logging.getLogger(weight_cache.__name__)

    def note(record: logging.LogRecord) -> bool:
        if WAITING in record.getMessage():
            event.set()
        return True

    level = log.level
    log.setLevel(logging.INFO)
    log.addFilter(note)
    yield event
    log.removeFilter(note)
    log.setLevel(level)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def answers(model: Path, cache: Path | None, quantize: str = "int4", **settings: Any) -> Answers:
    """Load a model, and return the tokens and logprobs of a prompt."""
    with load_runner(config_of(model, cache, quantize, **settings)) as runner:
        return answer_of(runner)


def config_of(model: Path, cache: Path | None, quantize: str, **settings: Any) -> RunnerConfig:
    return RunnerConfig(
        str(model),
        dtype="bfloat16",
        quantize=quantize,
        kv_cache_bytes=1 << 22,
        max_model_len=64,
        weight_cache_dir=cache,
        **settings,
    )


def answer_of(runner: TorchRunner) -> Answers:
    drive = drives_of([prompt_of(20)], num_tokens=NUM_TOKENS)[0]
    Driver(runner, num_blocks=runner.kv_memory.num_blocks, block_size=16).run(drive)
    return drive.outputs, drive.logprobs


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


@contextmanager
def reads_no_matrix(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(self: TensorLoader, *_: object) -> None:
        raise AssertionError("a matrix is read")

    with monkeypatch.context() as patch:
        patch.setattr(TensorLoader, "_matrix", refuse)
        patch.setattr(TensorLoader, "_expert_matrix", refuse)
        yield


def started_load(model: Path, cache: Path) -> subprocess.Popen[str]:
    """Start a process that loads a model."""
    command = [sys.executable, "-m", "tests.support.cached_load", str(model), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("llama", "none"),
        ("llama", "int4"),
        ("llama", "int8"),
        ("qwen3-30b-a3b", "int4"),
        ("gpt-oss-20b", "int4"),
        ("qwen3-next-80b-a3b", "int4"),
        ("deepseek-v2-lite", "int4"),
        ("gptq", "none"),
        ("gguf", "none"),
    ],
)
def test_the_second_start_reads_no_matrix_and_computes_the_same_bits(
    name: str,
    quantize: str,
    models: dict[str, Path],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = answers(models[name], None, quantize)

    assert answers(models[name], cache, quantize) == expected
    [entry] = entries(cache)
    with reads_no_matrix(monkeypatch):
        assert answers(models[name], cache, quantize) == expected
    assert entries(cache) == [entry]


def test_a_running_node_maps_the_entry_which_can_be_deleted(
    models: dict[str, Path], cache: Path
) -> None:
    config = config_of(models["gguf"], cache, "none")
    expected = answers(models["gguf"], None, "none")

    for _ in range(2):  # packed by the first start, and found by the second one
        with load_runner(config) as runner:
            [entry] = entries(cache)
            assert str(entry) in Path("/proc/self/maps").read_text("utf-8")
            assert answer_of(runner) == expected

    with load_runner(config) as runner:
        assert entry.stat().st_mode & 0o777 == 0o400  # nobody writes into a mapped file
        entry.unlink()
        assert answer_of(runner) == expected


@pytest.mark.triton
def test_the_second_start_with_triton_kernels_reads_no_matrix_and_computes_the_same_bits(
    models: dict[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_triton()
    expected = answers(models["gptq"], cache, "none", kernels="triton")

    with reads_no_matrix(monkeypatch):
        assert answers(models["gptq"], cache, "none", kernels="triton") == expected

    assert len(entries(cache)) == 1


def test_changed_weights_are_packed_again(folder: Path, cache: Path) -> None:
    before = answers(folder, cache)
    file = folder / "model.safetensors"
    facts, content = file.stat(), file.read_bytes()

    file.write_bytes(content[:-4096] + content[-8192:-4096])
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    after = answers(folder, cache)
    assert after != before
    assert after == answers(folder, None)
    assert len(entries(cache)) == 2


def test_an_entry_of_other_weights_is_not_used(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest differs, even if the files have the same identity."""
    monkeypatch.setattr(packing_key, "asdict", lambda _: {})
    before = answers(folder, cache)
    file = folder / "model.safetensors"
    content = file.read_bytes()

    file.write_bytes(content[:-4096] + content[-8192:-4096])

    after = answers(folder, cache)
    assert after != before
    assert after == answers(folder, None)
    assert len(entries(cache)) == 1


def test_each_quantization_and_each_variant_of_the_kernels_has_its_entry(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(folder, cache, "int4")
    answers(folder, cache, "int8")
    assert len(entries(cache)) == 2

    plain = next(each for each in KERNEL_VARIANTS if each.name == "plain")
    monkeypatch.setattr(choose, "best_variant", lambda _: plain)
    answers(folder, cache, "int4")
    assert len(entries(cache)) == 3


def test_each_importance_has_its_entry(folder: Path, cache: Path, tmp_path: Path) -> None:
    name, path = "model.layers.0.mlp.gate_proj", tmp_path / "importance.safetensors"
    found = [answers(folder, cache)]

    for powers in (torch.arange(64), -torch.arange(64)):
        save_file({name: 2.0 ** (powers / 4)}, path)
        settings = {"quantize_importance": str(path)}
        found.append(answers(folder, cache, **settings))
        assert found[-1] == answers(folder, cache, **settings) == answers(folder, None, **settings)

    assert len(entries(cache)) == 3
    assert found[0] != found[1] != found[2]


def test_weights_of_torch_are_not_kept(models: dict[str, Path], cache: Path) -> None:
    answers(models["llama"], cache, "int4", kernels="torch")

    assert entries(cache) == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-1], id="last byte cut off"),
        pytest.param(lambda content: content[:10], id="ten bytes"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: bytes([content[0] ^ 1]) + content[1:], id="first bit"),
        pytest.param(
            lambda content: content.replace(b'"num_rows": ', b'"num_rows":1', 1), id="table"
        ),
        pytest.param(lambda content: bytes(len(content)), id="zeros"),
    ],
)
def test_a_damaged_entry_is_written_again(
    damage: Any, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(folder, cache)
    [entry] = entries(cache)
    content = entry.read_bytes()
    entry.write_bytes(damage(content))

    assert answers(folder, cache) == expected

    assert "will be written again" in caplog.text
    assert entry.read_bytes() == content


def test_a_flipped_bit_of_a_matrix_is_found(folder: Path, cache: Path) -> None:
    expected = answers(folder, cache)
    [entry] = entries(cache)
    content = bytearray(entry.read_bytes())
    for at in range(64, len(content) // 2, len(content) // 8):
        with entry.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 0x10]))

        assert answers(folder, cache) == expected
        assert entry.read_bytes() == content


def test_two_processes_that_start_at_once_pack_once(models: dict[str, Path], cache: Path) -> None:
    with started_load(models["gguf"], cache) as one, started_load(models["gguf"], cache) as other:
        (out, log), (other_out, other_log) = one.communicate(), other.communicate()

    assert (log + other_log).count(WROTE) == 1
    assert log.count(READ) == other_log.count(READ) == 1  # so that they share its memory
    assert json.loads(out) == json.loads(other_out)
    assert [each.suffix for each in entries(cache)] == [".packed"]


def test_a_start_waits_for_the_one_that_packs(
    folder: Path, cache: Path, tmp_path: Path, waiting: threading.Event
) -> None:
    expected = answers(folder, cache)
    [entry] = entries(cache)
    kept = Path(shutil.move(entry, tmp_path / "kept"))
    part = entry.with_suffix(".part")

    with part.open("wb") as file, ThreadPoolExecutor(1) as threads:
        fcntl.flock(file, fcntl.LOCK_EX)
        load = threads.submit(answers, folder, cache)
        waiting.wait()
        part.write_bytes(kept.read_bytes())
        part.rename(entry)
        fcntl.flock(file, fcntl.LOCK_UN)

        assert load.result() == expected
    assert entries(cache) == [entry]


def test_what_a_dead_process_left_is_replaced(folder: Path, cache: Path) -> None:
    expected = answers(folder, cache)
    [entry] = entries(cache)
    content = entry.read_bytes()
    entry.unlink()
    entry.with_suffix(".part").write_bytes(content + b"more")
    (cache / "another.part").write_bytes(b"unfinished")

    assert answers(folder, cache) == expected

    assert entries(cache) == [entry]
    assert entry.read_bytes() == content


def test_a_file_that_another_process_writes_is_not_deleted(folder: Path, cache: Path) -> None:
    cache.mkdir(mode=0o700)
    part = cache / "another.part"
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        answers(folder, cache)
        assert part.exists()
    answers(folder, cache, "int8")
    assert not part.exists()


def test_a_full_disk_means_a_warning_and_no_entry(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(folder, None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))
    try:
        assert answers(folder, cache) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "File too large" in caplog.text
    assert entries(cache) == []


def test_room_is_left_on_the_disk(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_cache, "MIN_FREE_BYTES", 1 << 60)

    answers(folder, cache)

    assert "its disk has no room" in caplog.text
    assert entries(cache) == []


@pytest.mark.parametrize("fault", ["a file", "others may write"])
def test_a_folder_that_cannot_be_used_means_a_warning(
    fault: str, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "a file":
        cache.write_text("")
    else:
        cache.mkdir()
        cache.chmod(0o777)

    assert answers(folder, cache) == answers(folder, None)

    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "weight-cache-dir" in warning.message


def test_the_least_recently_used_entry_is_deleted(models: dict[str, Path], cache: Path) -> None:
    model = models["llama"]
    answers(model, cache, "int4")
    [first] = entries(cache)
    answers(model, cache, "int8")
    [second] = set(entries(cache)) - {first}
    answers(model, cache, "int4")  # used again

    total = first.stat().st_size + second.stat().st_size
    answers(models["gguf"], cache, "none", weight_cache_bytes=total)

    assert first in entries(cache)
    assert second not in entries(cache)
    assert sum(each.stat().st_size for each in entries(cache)) <= total


def test_an_entry_beyond_the_limit_is_not_written(folder: Path, cache: Path) -> None:
    answers(folder, cache, "int4")
    kept = entries(cache)

    answers(folder, cache, "int8", weight_cache_bytes=1 << 12)

    assert entries(cache) == kept


def test_a_model_that_changes_while_it_is_loaded_leaves_no_entry(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = TensorLoader._matrix

    def load_and_change(self: TensorLoader, *args: Any) -> Any:
        (folder / "model.safetensors").touch()
        return loaded(self, *args)

    monkeypatch.setattr(TensorLoader, "_matrix", load_and_change)
    with pytest.raises(ModelError, match="changed while it was loaded"):
        answers(folder, cache)

    assert entries(cache) == []


def test_young_files_are_not_cached(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_key, "MIN_AGE_S", 1e9)

    answers(folder, cache)

    assert entries(cache) == []


def test_progress_of_both_starts_ends_at_100_percent(folder: Path, cache: Path) -> None:
    config = RunnerConfig(
        str(folder),
        dtype="bfloat16",
        quantize="int4",
        kv_cache_bytes=1 << 22,
        weight_cache_dir=cache,
    )
    for _ in range(2):
        seen: list[LoadProgress] = []
        with load_runner(config, seen.append):
            pass
        loaded = [each.loaded_bytes for each in seen]
        assert loaded == sorted(loaded)
        assert loaded[-1] == seen[-1].total_bytes


def test_the_option_names_a_folder_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert weight_cache_folder("") == tmp_path / "baton" / "packed"
    assert weight_cache_folder("off") is None
    assert weight_cache_folder("here") == Path("here")


def test_a_limit_below_zero_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="weight-cache-limit"):
        RunnerConfig(str(folder), weight_cache_bytes=-1)
