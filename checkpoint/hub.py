"""Finds checkpoints: local folders, and models of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import filter as filter_names
from functools import partial
from glob import escape
from pathlib import Path
from threading import Thread
from typing import TypeVar

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.gguf.file_choice import choose_files, is_gguf, list_models
from baton.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from baton.checkpoint.model_files import list_weight_files
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError

SAFETENSORS = "*.safetensors"
# Of a folder. Weights in other formats are not downloaded.
WANTED_FILES = ("*.json", SAFETENSORS, "*.jinja", "tokenizer.model")
PICKLED_FILES = "pytorch_model*.bin"  # where there are no others
CONNECT_TIMEOUT_S = 10
ANSWER_TIMEOUT_S = 15.0  # with the look-up of the name, which has no limit of its own
Answer = TypeVar("Answer")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")  # and a variant of the weights


@dataclass(frozen=True, slots=True)
class FileFormat:
    """Format of models that are one file, or its parts; other models are folders."""

    is_model: Callable[[Path], bool]
    list_models: Callable[[Sequence[str]], list[str]]  # among names; of one in parts, the first
    # Gets a repository, its files and the variant. Returns a model's files, its own first.
    choose_files: Callable[[str, Sequence[str], str], list[str]]
    open: Callable[[Path, str], Checkpoint]  # a file, and --mmproj


FILE_FORMATS: tuple[FileFormat, ...] = (
    FileFormat(is_gguf, list_models, choose_files, GgufCheckpoint.open),
)


def open_checkpoint(model: str, *, offline: bool = False, mmproj: str = "") -> Checkpoint:
    """Return the checkpoint of a path or a name of the hub, which is downloaded if needed.

    `mmproj` is the file of a GGUF model's vision tower, if it is not next to it.
    """
    path = resolve_model(model, offline=offline)
    if not path.is_dir():
        return _format_of(path).open(path, mmproj)
    if mmproj:
        raise ModelError(f"--mmproj {mmproj} is for GGUF files, and {path} is a folder")
    return SafetensorsFolder(path)


def resolve_model(model: str, *, offline: bool = False, cache: Path | None = None) -> Path:
    """Return a model's folder or file: local ones, or those in the Hugging Face cache.

    Downloads the model into the cache if needed, unless `offline`. `cache` defaults to
    huggingface_hub's own.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _file_in(path) or path
    if path.is_file():
        _format_of(path)
        return path
    if not HUB_NAME.fullmatch(model):
        raise ModelError(
            f"{model} is neither a folder or GGUF file on this machine nor a model name of the hub"
        )
    name, _, variant = model.partition(":")
    cached = _find_cached(name, variant, cache)
    if cached is not None:
        return cached
    if offline:
        raise ModelError(f"{_not_found(model)}; no download was tried (offline)")
    return _download(name, variant, cache)


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


def _format_of(file: Path) -> FileFormat:
    for each in FILE_FORMATS:
        if each.is_model(file):
            return each
    raise ModelError(f"{file} is a file; name its folder: {file.absolute().parent}")


def _file_in(folder: Path) -> Path | None:
    """Return the file that is the model of a folder without other weights."""
    if any(folder.glob(SAFETENSORS)):
        return None
    names = [path.name for path in folder.glob("*")]
    files = [folder / name for each in FILE_FORMATS for name in each.list_models(names)]
    if len(files) > 1:
        raise ModelError(
            f"{folder} has {len(files)} models: name one of {', '.join(map(str, files))}"
        )
    return files[0] if files else None


def _choose_files(repository: str, names: Sequence[str], variant: str) -> Sequence[str]:
    """Return the files of a model that is no folder, its own first. Raises ModelError."""
    is_folder = not variant and filter_names(names, SAFETENSORS)
    for each in FILE_FORMATS:
        if not is_folder and each.list_models(names):
            return each.choose_files(repository, names, variant)
    if is_folder or (not variant and filter_names(names, PICKLED_FILES)):
        return ()
    raise ModelError(f"{repository} has no GGUF file, and no {SAFETENSORS}")


# huggingface_hub is imported on use: the import is slow, and local folders do not need it.


def _find_cached(name: str, variant: str, cache: Path | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # No patterns: whether the files of this model are there is decided below.
        found = Path(
            snapshot_download(name, cache_dir=cache, local_files_only=True, allow_patterns=[])
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    if not variant and _is_complete(found):
        return found
    names = [path.relative_to(found).as_posix() for path in found.rglob("*")]
    try:
        files = _choose_files(name, names, variant)
    except ModelError:
        return None  # another variant
    is_here = all((found / file).is_file() for file in files)
    return found / files[0] if files and is_here else None


def _is_complete(snapshot: Path) -> bool:
    """Return whether a snapshot has its config and weights. Interrupted downloads lack some."""
    weights = list_weight_files(snapshot)
    return bool(weights) and all(path.exists() for path in (snapshot / "config.json", *weights))


def _download(name: str, variant: str, cache: Path | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # Connections fail with the HTTP library's error, the first base of the hub's.
    failures = (*HfHubHTTPError.__bases__, HFValidationError, LocalEntryNotFoundError)
    try:
        # One request, without the retries of `list_repo_files`.
        about = _answer_in_time(partial(HfApi().model_info, name, timeout=CONNECT_TIMEOUT_S))
        names = [each.rfilename for each in about.siblings or ()]
        files = _choose_files(name, names, variant)
        wanted = [*map(escape, files)] or [*WANTED_FILES]
        if not files and not filter_names(names, SAFETENSORS):
            wanted.append(PICKLED_FILES)
        found = Path(snapshot_download(name, cache_dir=cache, allow_patterns=wanted))
    except failures as error:
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise ModelError(
            f"{_not_found(name)}; the download failed: {reason}. Without a connection to "
            "the hub, name its folder or GGUF file instead"
        ) from error
    return found / files[0] if files else found


def _answer_in_time(request: Callable[[], Answer]) -> Answer:
    """Return the answer to a request, whose exceptions it raises. Raises TimeoutError."""
    answer = Future[Answer]()

    def run() -> None:
        try:
            answer.set_result(request())
        except Exception as error:  # noqa: BLE001 - `result` raises it
            answer.set_exception(error)

    Thread(target=run, name="hub", daemon=True).start()  # the process can end before it
    try:
        return answer.result(ANSWER_TIMEOUT_S)
    except TimeoutError:
        raise TimeoutError(f"the hub did not answer within {ANSWER_TIMEOUT_S:g} s") from None


def _not_found(model: str) -> str:
    folder = Path(model).expanduser().absolute()
    return f"no folder {folder}, and no model {model!r} in the Hugging Face cache"
