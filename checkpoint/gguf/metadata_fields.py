"""Fields of config.json from the metadata of GGUF files: those of many architectures. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.core.errors import ModelError

Fields = dict[str, object]
# Metadata fields of all architectures, by their names in config.json.
INTEGERS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
}
FLOATS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
YARN = {
    "attention_factor": "yarn_attn_factor",
    "extrapolation_factor": "yarn_ext_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale_all_dim": "yarn_log_multiplier",
}


def read_common_fields(file: GgufFile, by_layer: frozenset[str] = frozenset()) -> Fields:
    """Return the fields that all architectures have, but those whose numbers differ by layer."""
    integers = {name: each for name, each in INTEGERS.items() if name not in by_layer}
    fields = {**read_integers(file, integers), **read_floats(file, FLOATS)}
    layers, predictors = (
        file.require(f"{file.architecture}.block_count", int),
        count_predictors(file),
    )
    return {
        **fields,
        **({"num_nextn_predict_layers": predictors} if predictors else {}),
        **_window_pattern(file),
        "num_hidden_layers": layers - predictors,
        "rope_scaling": read_rope_scaling(file),
        "vocab_size": _embedding_rows(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }


def count_predictors(file: GgufFile) -> int:
    """Return the number of layers after the last one, which predict several tokens at once."""
    return file.get(f"{file.architecture}.nextn_predict_layers", int, 0)


def read_integers(file: GgufFile, names: Mapping[str, str]) -> Fields:
    found: Fields = {}
    for hub_name, name in names.items():
        full = f"{file.architecture}.{name}"
        if not file.has(full):
            continue
        value: object = file.metadata[full]
        if isinstance(value, list) and len(different := set(value) - {0}) == 1:
            [value] = different  # the same in all layers but those that have none
        if type(value) is not int:
            raise file.wrong(full, "must be a whole number, the same in all layers")
        found[hub_name] = value
    return found


def read_floats(file: GgufFile, names: Mapping[str, str]) -> Fields:
    prefix = file.architecture
    return {
        hub_name: file.require(f"{prefix}.{name}", float)
        for hub_name, name in names.items()
        if file.has(f"{prefix}.{name}")
    }


def read_integer(file: GgufFile, name: str) -> int:
    return file.require(f"{file.architecture}.{name}", int)


def read_head_dim(file: GgufFile) -> int:
    fields = read_integers(file, INTEGERS)
    heads, hidden = (
        int(str(fields.get(name, 0))) for name in ("num_attention_heads", "hidden_size")
    )
    return int(str(fields.get("head_dim", hidden // max(1, heads))))


def read_rope_scaling(file: GgufFile) -> Fields:
    """Return the scaling of RoPE. Factors by dimension are tensors of their own."""
    prefix = f"{file.architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    factors = [
        name for name in ("rope_freqs", "rope_factors_long") if f"{name}.weight" in file.tensors
    ]
    if factors:
        return {**_rope_factors(file, prefix), **_trained_length(file, prefix)}
    if kind == "none" or not file.has(f"{prefix}.factor"):
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise file.wrong(f"{prefix}.type", "must be linear, yarn or longrope with its factors")
    scaling: Fields = {"rope_type": kind, "factor": file.require(f"{prefix}.factor", float)}
    if kind == "yarn":
        names = {hub_name: f"rope.scaling.{name}" for hub_name, name in YARN.items()}
        scaling |= read_floats(file, names)
        if "mscale_all_dim" in scaling:  # the other one is not in the metadata
            scaling["mscale"] = 1.0
        if scaling.get("extrapolation_factor") in (-1.0, 1.0):  # no change
            del scaling["extrapolation_factor"]
    return {**scaling, **_trained_length(file, prefix)}


def _trained_length(file: GgufFile, prefix: str) -> Fields:
    name = f"{prefix}.original_context_length"
    return {"original_max_position_embeddings": file.require(name, int)} if file.has(name) else {}


def _rope_factors(file: GgufFile, prefix: str) -> Fields:
    """Return factors as those of LongRoPE. Llama 3 has the same ones for all lengths."""
    if "rope_freqs.weight" in file.tensors:
        factors = file.read_floats("rope_freqs.weight")
        scaling: Fields = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    else:
        scaling = {
            "short_factor": file.read_floats("rope_factors_short.weight"),
            "long_factor": file.read_floats("rope_factors_long.weight"),
        }
        if file.has(f"{prefix}.attn_factor"):
            scaling["attention_factor"] = file.require(f"{prefix}.attn_factor", float)
    return {"rope_type": "longrope", **scaling}


def _window_pattern(file: GgufFile) -> Fields:
    """Return the pattern of layers with a window, if the file has one."""
    name = f"{file.architecture}.attention.sliding_window_pattern"
    pattern = file.metadata.get(name)
    if type(pattern) is int:
        return {"sliding_window_pattern": pattern}
    flags = file.list_of(name, bool)
    types = ["sliding_attention" if flag else "full_attention" for flag in flags]
    return {"layer_types": types} if any(flags) else {}


def _embedding_rows(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor 'token_embd.weight'; fetch it again")
    return file.tensors["token_embd.weight"].shape[0]


def _dtype(file: GgufFile) -> str:
    types = {entry.type.name for entry in file.tensors.values()}
    return "float32" if types == {"F32"} else "bfloat16"
