"""Finds checkpoints: local folders, and models of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.model_files import INDEX, SINGLE, read_shard_names
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError

# Weights in other formats are not downloaded.
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
GGUF_MAGIC = b"GGUF"
NO_GGUF = (
    "GGUF is not supported yet. Use the folder or hub name of the original model, which has "
    "config.json and *.safetensors; --quantize int8 or int4 makes its weights as small"
)
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def open_checkpoint(model: str, *, offline: bool = False) -> Checkpoint:
    """Return the checkpoint of a path or a name of the hub, which is downloaded if needed."""
    return SafetensorsFolder(resolve_model_folder(model, offline=offline))


def resolve_model_folder(model: str, *, offline: bool = False, cache: Path | None = None) -> Path:
    """Return the path of a local folder or of a snapshot in the Hugging Face cache.

    Downloads the model into the cache if needed, unless `offline`. `cache` defaults to
    huggingface_hub's own.
    """
    folder = Path(model).expanduser()
    if _is_gguf(folder):
        raise ModelError(f"{model}: {NO_GGUF}")
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelError(f"{model} is a file; name its folder: {folder.absolute().parent}")
    if not HUB_NAME.fullmatch(model):
        raise ModelError(f"{model} is neither a folder on this machine nor a model name of the hub")
    cached = _find_cached(model, cache)
    if cached is not None:
        return cached
    if offline:
        raise ModelError(f"{_not_found(model)}; no download was tried (offline)")
    return _download(model, cache)


def served_name(model: str) -> str:
    """Return the name by which clients know a model, unless an option sets another.

    It is the last name of a folder's path, or the name of the hub.
    """
    folder = Path(model).expanduser()
    return os.path.basename(os.path.abspath(folder)) if folder.is_dir() else model


def model_root(model: str) -> str:
    """Return where the model comes from: the absolute path of a folder, or the name of the hub."""
    folder = Path(model).expanduser()
    return os.path.abspath(folder) if folder.is_dir() else model


def _is_gguf(path: Path) -> bool:
    """Return whether this is a GGUF file, a folder of such files alone, or named like one."""
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    if path.suffix.lower() == ".gguf":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


# huggingface_hub is imported on use: the import is slow, and local folders do not need it.


def _find_cached(model: str, cache: Path | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model,
            cache_dir=cache,
            allow_patterns=list(WANTED_FILES),
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(found) if _is_complete(Path(found)) else None


def _is_complete(snapshot: Path) -> bool:
    """Return whether a snapshot has its config and weights. Interrupted downloads lack some."""
    index = snapshot / INDEX
    weights = read_shard_names(index) if index.exists() else [SINGLE]
    return all((snapshot / name).exists() for name in ("config.json", *weights))


def _download(model: str, cache: Path | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(model, cache_dir=cache, allow_patterns=list(WANTED_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise ModelError(f"{_not_found(model)}; the download failed: {reason}") from error
    return Path(found)


def _not_found(model: str) -> str:
    if model.lower().endswith("gguf"):
        return f"{model}: {NO_GGUF}"
    folder = Path(model).expanduser().absolute()
    return f"no folder {folder}, and no model {model!r} in the Hugging Face cache"
