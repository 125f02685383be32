"""Model folders: resolution of names and parsing of small JSON files. Independent of torch."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from baton.core.errors import InvalidRequest, ModelError
from baton.core.sampling import SamplingDefaults

# Weights in other formats are not downloaded.
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
MAX_INT = (1 << 31) - 1
MAX_SHOWN = 200  # characters of a wrong value in an error
MAX_TEXT_BYTES = 64 << 20  # of one file; the largest tokenizers have 35 MB
INDEX = "model.safetensors.index.json"
GGUF_MAGIC = b"GGUF"
NO_GGUF = (
    "GGUF is not supported yet. Use the folder or hub name of the original model, which has "
    "config.json and *.safetensors; --quantize int8 or int4 makes its weights as small"
)
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Contents of generation_config.json: EOS tokens and default sampling parameters."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def sampling(self) -> SamplingDefaults:
        return SamplingDefaults(
            self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty
        )


def resolve_model_folder(
    model: str, *, revision: str | None = None, offline: bool = False, cache: Path | None = None
) -> Path:
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
    cached = _find_cached(model, revision, cache)
    if cached is not None:
        return cached
    if offline:
        raise ModelError(f"{_not_found(model, revision)}; no download was tried (offline)")
    return _download(model, revision, cache)


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


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read generation_config.json. Without its EOS tokens, those of config.json are used."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(_eos_ids_of_model(folder))
    raw = JsonFields.read(path)
    ids = _eos_ids(raw) or _eos_ids_of_model(folder)
    defaults = GenerationDefaults(
        eos_token_ids=ids,
        temperature=raw.optional_number("temperature"),
        top_p=raw.optional_number("top_p"),
        top_k=raw.positive_int("top_k") if raw.optional_number("top_k") else None,
        min_p=raw.optional_number("min_p"),
        repetition_penalty=raw.optional_number("repetition_penalty"),
    )
    try:
        defaults.sampling.params()
    except InvalidRequest as error:
        raise ModelError(f"{path}: {error}; correct it, or delete the file") from error
    return defaults


def read_model_text(path: Path) -> str:
    """Read a text file of a model folder. Raises ModelError, which names the file.

    Pipes and devices are refused: reading them might never end.
    """
    try:
        if not path.exists():
            raise ModelError(f"{path} is missing; a model folder must have it")
        if not path.is_file():
            raise ModelError(f"{path} is not a file; fetch it again")
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise ModelError(f"{path} has more than {MAX_TEXT_BYTES} bytes; fetch it again")
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error


def read_shard_names(index: Path) -> list[str]:
    """Return the names of the weight files that an index lists, sorted. Raises ModelError.

    All are files of the index's own folder: another path would read what is not the model's.
    """
    fields = JsonFields.read(index)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fields.wrong("weight_map", "must map each tensor to its file")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not is_plain_name(name):
            raise ModelError(
                f"{index}: {_shorten(repr(name))} is not the name of a file in this folder; an "
                "index can name no other. Fetch the model again, from a source that you trust"
            )
    return names


def is_plain_name(name: str) -> bool:
    return name.isprintable() and name not in ("", ".", "..") and not set(name) & {"/", "\\"}


class JsonFields:
    """Typed access to a JSON object. Errors name the file and the field."""

    def __init__(self, where: str, fields: Mapping[str, object]) -> None:
        self.where = where
        self._fields = fields

    @classmethod
    def read(cls, path: Path) -> JsonFields:
        try:
            parsed = json.loads(read_model_text(path))
        except RecursionError:
            raise ModelError(f"{path} is nested too deeply; fetch it again") from None
        except ValueError as error:  # also for a number of too many digits
            raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
        if not isinstance(parsed, dict):
            raise ModelError(f"{path} is not a JSON object; fetch it again")
        return cls(str(path), parsed)

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def is_null(self, name: str) -> bool:
        return name in self._fields and self._fields[name] is None

    def names(self) -> Iterable[str]:
        return self._fields.keys()

    def get(self, name: str) -> object:
        return self._fields.get(name)

    def inner(self, name: str) -> JsonFields:
        found = self._fields.get(name)
        if not isinstance(found, dict):
            raise self.wrong(name, "must be an object")
        return JsonFields(f"{self.where}: {name}", found)

    def number(
        self, name: str, default: float | None = None, *, above: float | None = None
    ) -> float:
        found = self._fields.get(name)
        found = default if found is None else found
        if not _is_number(found):
            raise self.wrong(name, "must be a number")
        if above is not None and found <= above:
            raise self.wrong(name, f"must be a number above {above:g}")
        return float(found)

    def optional_number(self, name: str, *, above: float | None = None) -> float | None:
        return self.number(name, above=above) if self.has(name) else None

    def positive_int(self, name: str, default: int | None = None) -> int:
        found = self.number(name, default)
        if found < 1 or found != int(found):
            raise self.wrong(name, "must be a whole number above 0")
        if found > MAX_INT:
            raise self.wrong(name, f"must be at most {MAX_INT}")
        return int(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self._fields.get(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.wrong(name, "must be true or false")
        return found

    def numbers(self, name: str) -> tuple[float, ...]:
        found = self._fields.get(name)
        if not isinstance(found, list) or not all(map(_is_number, found)):
            raise self.wrong(name, "must be a list of numbers")
        return tuple(map(float, found))

    def with_defaults(self, defaults: Mapping[str, object]) -> JsonFields:
        """Return these fields, with the default of each field that is missing."""
        return JsonFields(self.where, {**defaults, **self._fields})

    def with_fields(self, fields: Mapping[str, object]) -> JsonFields:
        """Return these fields, some of them replaced."""
        return JsonFields(self.where, {**self._fields, **fields})

    def wrong(self, name: str, expected: str) -> ModelError:
        found = self._fields.get(name)
        state = "is missing" if found is None else f"is {_shorten(repr(found))}"
        return ModelError(f"{self.where}: {name!r} {state}; it {expected}")


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether this fits a finite float. Python's JSON also has NaN and Infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _eos_ids_of_model(folder: Path) -> tuple[int, ...]:
    raw = JsonFields.read(folder / "config.json")
    is_within = raw.has("text_config") and not raw.has("eos_token_id")
    return _eos_ids(raw.inner("text_config") if is_within else raw)


def _eos_ids(raw: JsonFields) -> tuple[int, ...]:
    found = raw.get("eos_token_id")
    if found is None:
        return ()
    listed = found if isinstance(found, list) else [found]
    if not all(type(token_id) is int and abs(token_id) <= MAX_INT for token_id in listed):
        raise raw.wrong("eos_token_id", "must be a token id or a list of them")
    return tuple(listed)


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


def _find_cached(model: str, revision: str | None, cache: Path | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model,
            revision=revision,
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
    weights = read_shard_names(index) if index.exists() else ["model.safetensors"]
    return all((snapshot / name).exists() for name in ("config.json", *weights))


def _download(model: str, revision: str | None, cache: Path | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=cache, allow_patterns=list(WANTED_FILES)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise ModelError(f"{_not_found(model, revision)}; the download failed: {reason}") from error
    return Path(found)


def _not_found(model: str, revision: str | None) -> str:
    if model.lower().endswith("gguf"):
        return f"{model}: {NO_GGUF}"
    at = f" at revision {revision}" if revision else ""
    return (
        f"no folder {Path(model).expanduser().absolute()}, and no model {model!r}{at} in the "
        f"Hugging Face cache"
    )
