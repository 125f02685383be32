"""Files of a model folder: weights, generation defaults, chat templates, image processor."""

from __future__ import annotations

from pathlib import Path

from baton.checkpoint.checkpoint import GenerationDefaults
from baton.checkpoint.json_fields import MAX_INT, JsonFields, read_model_text, shorten
from baton.core.errors import InvalidRequest, ModelError
from baton.core.sampling import SamplingDefaults

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Of older models and draft heads, where the others are missing.
PICKLED_INDEX, PICKLED = "pytorch_model.bin.index.json", "pytorch_model.bin"
EOS = "eos_token_id"


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read generation_config.json. Without its EOS tokens, those of config.json are used."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(_eos_ids_of_model(folder))
    raw = JsonFields.read(path)
    defaults = SamplingDefaults(
        temperature=raw.optional_number("temperature"),
        top_p=raw.optional_number("top_p"),
        top_k=raw.positive_int("top_k") if raw.optional_number("top_k") else None,
        min_p=raw.optional_number("min_p"),
        repetition_penalty=raw.optional_number("repetition_penalty"),
    )
    try:
        defaults.params()
    except InvalidRequest as error:
        raise ModelError(f"{path}: {error}; correct it, or delete the file") from error
    return GenerationDefaults(
        _token_ids(raw, EOS) or _eos_ids_of_model(folder),
        defaults,
        suppressed_token_ids=_token_ids(raw, "suppress_tokens"),
    )


def read_tokenizer_config(folder: Path) -> JsonFields:
    path = folder / "tokenizer_config.json"
    return JsonFields.read(path) if path.exists() else JsonFields(str(path), {})


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Return the templates by name. A separate file overrides tokenizer_config.json."""
    settings = read_tokenizer_config(folder)
    embedded = settings.get("chat_template")
    templates = {}
    if isinstance(embedded, str):
        templates["default"] = embedded
    if isinstance(embedded, list):
        if not all(
            isinstance(item, dict) and {"name", "template"} <= item.keys() for item in embedded
        ):
            raise settings.wrong("chat_template", "must be a text, or list names and templates")
        templates = {str(item["name"]): str(item["template"]) for item in embedded}
    separate_file = folder / "chat_template.jinja"
    if separate_file.exists():
        templates["default"] = read_model_text(separate_file)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_model_text(path)
    return templates


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files that should have the weights. Raises ModelError for a wrong index."""
    for index, single in ((INDEX, SINGLE), (PICKLED_INDEX, PICKLED)):
        if (folder / index).exists():
            return [folder / name for name in read_shard_names(folder / index)]
        if (folder / single).is_file():
            return [folder / single]
    return []


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
                f"{index}: {shorten(repr(name))} is not the name of a file in this folder; an "
                "index can name no other. Fetch the model again, from a source that you trust"
            )
    return names


def is_plain_name(name: str) -> bool:
    return name.isprintable() and name not in ("", ".", "..") and not set(name) & {"/", "\\"}


def _eos_ids_of_model(folder: Path) -> tuple[int, ...]:
    raw = JsonFields.read(folder / "config.json")
    is_within = raw.has("text_config") and not raw.has(EOS)
    return _token_ids(raw.inner("text_config") if is_within else raw, EOS)


def _token_ids(raw: JsonFields, name: str) -> tuple[int, ...]:
    found = raw.get(name)
    if found is None:
        return ()
    listed = found if isinstance(found, list) else [found]
    if not all(type(token_id) is int and abs(token_id) <= MAX_INT for token_id in listed):
        raise raw.wrong(name, "must be a token id or a list of them")
    return tuple(listed)
