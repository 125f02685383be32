"""Downloads of GGUF files from a model hub, by names with a quantization."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.model_hub import ClosingServer, ModelHub

REPOSITORY = "maker/model-GGUF"
PARTS = tuple(f"BF16/model-BF16-0000{part}-of-00002.gguf" for part in (1, 2))
FILES = {
    "README.md": b"# A model",
    "model-Q4_K_M.gguf": b"GGUF" + bytes(range(256)) * 512,
    "model-Q8_0.gguf": b"GGUF" + bytes(1000),
    PARTS[0]: b"GGUF" + bytes(2000),
    PARTS[1]: b"GGUF" + bytes(range(256)) * (1 << 16),
}
PROGRAM = """
import sys
from pathlib import Path
from baton.checkpoint.hub import resolve_model
from baton.core.errors import ModelError
for name in sys.argv[2:]:
    try:
        print(resolve_model(name.lstrip('-'), offline=name[0] == '-', cache=Path(sys.argv[1])))
    except ModelError as error:
        print(error)
"""


@pytest.fixture
def hub() -> Iterator[ModelHub]:
    with ModelHub(REPOSITORY, FILES) as running:
        yield running


def start(hub: ModelHub | ClosingServer, cache: Path, *names: str) -> subprocess.Popen[str]:
    """Start a process that resolves names, and prints a path or an error for each."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache / "home")}
    command = [sys.executable, "-c", PROGRAM, str(cache), *names]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def resolve(hub: ModelHub | ClosingServer, cache: Path, *names: str) -> list[str]:
    with start(hub, cache, *names) as process:
        output, _ = process.communicate()
    return output.splitlines()


def test_names_with_a_quantization_download_their_files_once(hub: ModelHub, tmp_path: Path) -> None:
    names = [f"{REPOSITORY}{quantization}" for quantization in ("", ":bf16", ":Q6_K", "", ":BF16")]

    found = resolve(hub, tmp_path, *names, f"-{REPOSITORY}:Q4_K_M", "maker/unknown:Q8_0")

    first, parts, missing, *again, offline, unknown = found
    assert Path(first).read_bytes() == FILES["model-Q4_K_M.gguf"]
    assert Path(parts).name == Path(PARTS[0]).name
    assert [Path(parts).with_name(Path(part).name).read_bytes() for part in PARTS] == [
        FILES[part] for part in PARTS
    ]
    assert "no GGUF file in Q6_K; it has BF16, Q4_K_M, Q8_0. Name one, as in" in missing
    assert [*again, offline] == [first, parts, first]
    assert "no model 'maker/unknown' in the Hugging Face cache; the download failed" in unknown
    assert sorted(hub.downloads) == [(PARTS[0], 0), (PARTS[1], 0), ("model-Q4_K_M.gguf", 0)]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_hub_that_cannot_be_reached_is_one_line_without_retries(
    tmp_path: Path, is_open: bool
) -> None:
    """The port is closed, or each connection ends at once."""
    with ClosingServer() as server:
        if not is_open:
            server.close()

        lines = resolve(server, tmp_path, f"{REPOSITORY}:Q8_0")

    [line] = lines
    assert f"no model '{REPOSITORY}' in the Hugging Face cache; the download failed" in line
    assert line.endswith("name its folder or GGUF file instead")
    assert server.num_connections <= 2 * is_open  # huggingface_hub sends a request of its own, too


def test_a_folder_in_the_cache_needs_no_hub(hub: ModelHub, tmp_path: Path) -> None:
    weights = {"config.json": b"{}", "model.safetensors": bytes(100), "pytorch_model.bin": b"no"}
    hub.files = {"README.md": b"# A model", **weights}

    downloaded, cached = resolve(hub, tmp_path, REPOSITORY, f"-{REPOSITORY}")

    assert sorted(path.name for path in Path(cached).iterdir()) == sorted(weights)[:2]
    assert downloaded == cached


def test_pickled_weights_are_downloaded_where_there_are_no_others(
    hub: ModelHub, tmp_path: Path
) -> None:
    weights = {"config.json": b"{}", "pytorch_model.bin": bytes(100)}
    hub.files = {"training_args.bin": b"no", **weights}

    downloaded, cached = resolve(hub, tmp_path, REPOSITORY, f"-{REPOSITORY}")

    assert sorted(path.name for path in Path(cached).iterdir()) == sorted(weights)
    assert downloaded == cached


def test_a_repository_without_weights_is_refused(hub: ModelHub, tmp_path: Path) -> None:
    hub.files = {"README.md": b"# A model", "model.bin": b"no"}

    [line] = resolve(hub, tmp_path, REPOSITORY)

    assert line == f"{REPOSITORY} has no GGUF file, and no *.safetensors"
    assert hub.downloads == []


def test_the_vision_tower_of_a_model_is_downloaded_with_it(hub: ModelHub, tmp_path: Path) -> None:
    towers = ("mmproj-F32.gguf", "mmproj-F16.gguf")
    hub.files = {"model-Q4_K_M.gguf": b"GGUF", **dict.fromkeys(towers, b"GGUF")}

    downloaded, cached = resolve(hub, tmp_path, REPOSITORY, f"-{REPOSITORY}")

    assert sorted(path.name for path in Path(cached).parent.iterdir()) == [
        towers[1],
        "model-Q4_K_M.gguf",
    ]
    assert downloaded == cached


def test_an_interrupted_download_is_no_model_and_goes_on(hub: ModelHub, tmp_path: Path) -> None:
    hub.held = PARTS[1]
    with start(hub, tmp_path, f"{REPOSITORY}:BF16") as process:
        hub.is_held.wait()
        process.send_signal(signal.SIGKILL)
    hub.release()

    absent, path = resolve(hub, tmp_path, f"-{REPOSITORY}:BF16", f"{REPOSITORY}:BF16")

    assert "in the Hugging Face cache; no download was tried (offline)" in absent
    assert Path(path).with_name(Path(PARTS[1]).name).read_bytes() == FILES[PARTS[1]]
