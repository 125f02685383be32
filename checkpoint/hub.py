"""Finds checkpoints: local folders, and models of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from fnmatch import filter as filter_names
from glob import escape
from pathlib import Path

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.gguf.file_choice import choose_files, is_projector, order_projectors
from baton.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from baton.checkpoint.gguf.gguf_file import is_later_part, list_parts
from baton.checkpoint.model_files import list_weight_files
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError

# Weights in other formats are not downloaded.
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
PICKLED_FILES = "pytorch_model*.bin"  # where there are no others
CONNECT_TIMEOUT_S = 10
GGUF_MAGIC = b"GGUF"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")  # and a quantization of GGUF


def open_checkpoint(model: str, *, offline: bool = False, mmproj: str = "") -> Checkpoint:
    """Return the checkpoint of a path or a name of the hub, which is downloaded if needed.

    `mmproj` is the file of a GGUF model's vision tower, if it is not next to it.
    """
    path = resolve_model(model, offline=offline)
    if not path.is_dir():
        checkpoint = GgufCheckpoint(path, Path(mmproj).expanduser() if mmproj else None)
        if mmproj:
            checkpoint.read_config()  # raises ModelError if it does not fit
        return checkpoint
    if mmproj:
        raise ModelError(f"--mmproj {mmproj} is for GGUF files, and {path} is a folder")
    return SafetensorsFolder(path)


def resolve_model(model: str, *, offline: bool = False, cache: Path | None = None) -> Path:
    """Return a model's folder, or its GGUF file: local ones, or those in the Hugging Face cache.

    Downloads the model into the cache if needed, unless `offline`. `cache` defaults to
    huggingface_hub's own.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _gguf_of(path) or path
    if path.is_file():
        if _is_gguf(path):
            return path
        raise ModelError(f"{model} is a file; name its folder: {path.absolute().parent}")
    if not HUB_NAME.fullmatch(model):
        raise ModelError(
            f"{model} is neither a folder or GGUF file on this machine nor a model name of the hub"
        )
    name, _, quantization = model.partition(":")
    cached = _find_cached(name, quantization, cache)
    if cached is not None:
        return cached
    if offline:
        raise ModelError(f"{_not_found(model)}; no download was tried (offline)")
    return _download(name, quantization, cache)


def served_name(model: str) -> str:
    """Return the name by which clients know a model, unless an option sets another.

    It is the last name of a folder's path, or the name of the hub.
    """
    path = Path(model).expanduser()
    return os.path.basename(os.path.abspath(path)) if path.exists() else model


def model_root(model: str) -> str:
    """Return the origin of the model: an absolute path, or the name of the hub."""
    path = Path(model).expanduser()
    return os.path.abspath(path) if path.exists() else model


def _is_gguf(path: Path) -> bool:
    """Return whether a file is named or begins like GGUF. Ollama names files by their digest."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def _gguf_of(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no other weights, the first of its parts."""
    if any(folder.glob("*.safetensors")):
        return None
    found = sorted(path for path in folder.glob("*.gguf") if not is_later_part(path))
    files = [path for path in found if not is_projector(path.name)]
    if len(files) > 1:
        raise ModelError(
            f"{folder} has {len(files)} models: name one of {', '.join(map(str, files))}"
        )
    return files[0] if files else None


# huggingface_hub is imported on use: the import is slow, and local folders do not need it.


def _find_cached(name: str, quantization: str, cache: Path | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # No patterns: whether the files of this model are there is decided below.
        found = Path(
            snapshot_download(name, cache_dir=cache, local_files_only=True, allow_patterns=[])
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    if not quantization and _is_complete(found):
        return found
    try:
        files = choose_files(name, _list_files(found), quantization)
        return list_parts(found / files[0])[0]
    except ModelError:
        return None  # another quantization, or a part of this one


def _list_files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]


def _is_complete(snapshot: Path) -> bool:
    """Return whether a snapshot has its config and weights. Interrupted downloads lack some."""
    weights = list_weight_files(snapshot)
    return bool(weights) and all(path.exists() for path in (snapshot / "config.json", *weights))


def _download(name: str, quantization: str, cache: Path | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # Connections fail with the HTTP library's error, the first base of the hub's.
    failures = (*HfHubHTTPError.__bases__, HFValidationError, LocalEntryNotFoundError)
    try:
        # One request, without the retries of `list_repo_files`.
        about = HfApi().model_info(name, timeout=CONNECT_TIMEOUT_S)
        names = [each.rfilename for each in about.siblings or ()]
        wanted = list(WANTED_FILES)
        kinds = {Path(each).suffix for each in names}
        if not kinds & {".safetensors", ".gguf"} and filter_names(names, PICKLED_FILES):
            wanted.append(PICKLED_FILES)
        is_folder = not quantization and (".safetensors" in kinds or PICKLED_FILES in wanted)
        files = None if is_folder else choose_files(name, names, quantization)
        if files is not None:
            wanted = [escape(file) for file in (*files, *order_projectors(names)[:1])]
        found = Path(snapshot_download(name, cache_dir=cache, allow_patterns=wanted))
    except failures as error:
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise ModelError(
            f"{_not_found(name)}; the download failed: {reason}. Without a connection to "
            "the hub, name its folder or GGUF file instead"
        ) from error
    return found if files is None else found / files[0]


def _not_found(model: str) -> str:
    folder = Path(model).expanduser().absolute()
    return f"no folder {folder}, and no model {model!r} in the Hugging Face cache"
