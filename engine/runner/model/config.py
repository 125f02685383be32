"""Model configuration, read from config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.model_folder import JsonFields
from engine.runner.weights.quantization import Quantization, read_quantization

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE parameters. Fields other than `theta` apply only to some kinds."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a decoder, independent of its model family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]  # by layer; includes the token itself
    ties_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    dtype: str  # of the saved weights: float32, bfloat16 or float16
    quantization: Quantization | None  # of the saved weights

    def max_context_len(self) -> int:
        """Return the maximum context length, with RoPE scaling applied."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(stretched, self.max_position_embeddings)
        return self.max_position_embeddings


def read_model_config(folder: Path) -> ModelConfig:
    raw = JsonFields.read(folder / "config.json")
    architecture = _architecture(raw)
    _check_supported(raw)
    num_heads = raw.positive_int("num_attention_heads")
    hidden_size = raw.positive_int("hidden_size")
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    is_mistral = architecture == "MistralForCausalLM"
    attention_bias = not (is_qwen2 or is_mistral) and raw.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=raw.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.positive_int("intermediate_size"),
        num_layers=raw.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.positive_int("num_key_value_heads", 8 if is_mistral else num_heads),
        head_dim=raw.positive_int("head_dim", 128 if is_qwen3 else hidden_size // num_heads),
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        max_position_embeddings=raw.positive_int("max_position_embeddings"),
        rope=_rope(raw),
        sliding_windows=_sliding_windows(raw, architecture),
        ties_embeddings=raw.flag("tie_word_embeddings", False),
        has_qkv_bias=is_qwen2 or attention_bias,
        has_output_bias=attention_bias,
        has_mlp_bias=architecture == "LlamaForCausalLM" and raw.flag("mlp_bias", False),
        has_qk_norm=is_qwen3,
        dtype=_dtype(raw),
        quantization=read_quantization(raw),
    )
    _check_heads(config, raw)
    return config


def _architecture(raw: JsonFields) -> str:
    names = raw.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES:
        return str(names[0])
    raise raw.wrong("architectures", f"must name one of {', '.join(ARCHITECTURES)}")


def _check_supported(raw: JsonFields) -> None:
    if raw.has("hidden_act") and raw.get("hidden_act") != "silu":
        raise raw.wrong("hidden_act", "must be 'silu'")
    if raw.number("partial_rotary_factor", 1.0) != 1.0:
        raise raw.wrong("partial_rotary_factor", "must be 1")


def _check_heads(config: ModelConfig, raw: JsonFields) -> None:
    if config.num_heads % config.num_kv_heads:
        expected = f"must divide num_attention_heads ({config.num_heads})"
        raise raw.wrong("num_key_value_heads", expected)
    if config.head_dim % 2:
        raise raw.wrong("head_dim", "must be even")


def _dtype(raw: JsonFields) -> str:
    # transformers 5 writes `dtype`, earlier ones `torch_dtype`.
    name = "dtype" if raw.has("dtype") else "torch_dtype"
    if not raw.has(name):
        return "float32"
    if raw.get(name) not in ("float32", "bfloat16", "float16"):
        raise raw.wrong(name, "must be float32, bfloat16 or float16")
    return str(raw.get(name))


def _sliding_windows(raw: JsonFields, architecture: str) -> tuple[int | None, ...]:
    num_layers = raw.positive_int("num_hidden_layers")
    if architecture == "MistralForCausalLM":
        return (_window(raw),) * num_layers
    if architecture == "LlamaForCausalLM" or not raw.flag("use_sliding_window", False):
        return (None,) * num_layers
    return _qwen_windows(raw, num_layers)


def _qwen_windows(raw: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    window = _window(raw)
    types = raw.get("layer_types")
    if types is None:
        first = int(raw.number("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise raw.wrong("layer_types", f"must list {num_layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in types)


def _window(raw: JsonFields) -> int | None:
    # A missing field means the family's default; null means no sliding window.
    if raw.is_null("sliding_window"):
        return None
    return raw.positive_int("sliding_window", 4096)


def _rope(raw: JsonFields) -> RopeConfig:
    """Read RoPE from `rope_parameters`, or from the older `rope_scaling` and `rope_theta`."""
    name = next((n for n in ("rope_scaling", "rope_parameters") if raw.has(n)), None)
    theta = raw.number("rope_theta", 10_000.0)
    if name is None:
        return RopeConfig(theta=theta)
    fields = raw.inner(name)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise fields.wrong("rope_type", f"must be one of {', '.join(ROPE_KINDS)}")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.wrong("partial_rotary_factor", "must be 1")
    theta = fields.number("rope_theta", theta)
    return RopeConfig(theta=theta) if kind == "default" else _scaled(raw, fields, str(kind), theta)


def _scaled(raw: JsonFields, fields: JsonFields, kind: str, theta: float) -> RopeConfig:
    longest = raw.positive_int("max_position_embeddings")
    original = fields.positive_int("original_max_position_embeddings", longest)
    # Some folders have the trained length at the top level; it takes precedence.
    original = raw.positive_int("original_max_position_embeddings", original)
    is_yarn, is_llama3 = kind == "yarn", kind == "llama3"
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=fields.number("factor", longest / original if is_yarn else None),
        original_max_position_embeddings=original,
        low_freq_factor=fields.number("low_freq_factor", None if is_llama3 else 1.0),
        high_freq_factor=fields.number("high_freq_factor", None if is_llama3 else 4.0),
        attention_factor=fields.optional_number("attention_factor"),
        beta_fast=fields.number("beta_fast", 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 1.0) or 1.0,
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        truncate=fields.flag("truncate", True),
    )
