"""Small model folders with random weights, and reference answers by transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
EOS_TOKEN_ID = 2
TRAINED_ON = "the quick brown fox jumps over the lazy dog; wie schön, naïve café, 東京 🙂 " * 20
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Towers:
    """Surroundings of a text model in a folder: other fields, and tensors that it does not need."""

    fields: Mapping[str, Any]
    tensors: Sequence[str]


@dataclass(frozen=True, slots=True)
class Variant:
    """One small model: its family and the settings that differ from SMALL."""

    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_sharded: bool = False
    dtype: str = "float32"
    model_class: str = ""  # by default {family}ForCausalLM
    vision: Mapping[str, Any] | None = None  # of a model that also takes images
    towers: Towers | None = None  # of one that transformers builds with another package


SMALL: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}


def _rope(kind: str, **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


VARIANTS: Mapping[str, Variant] = {
    "llama": Variant("Llama"),
    "llama-tied-mqa": Variant("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-mha-biased-sharded": Variant(
        "Llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        is_sharded=True,
    ),
    "llama-rope-llama3": Variant(
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-rope-linear": Variant("Llama", _rope("linear", factor=2.0)),
    "llama-rope-dynamic": Variant(
        "Llama", {"max_position_embeddings": 64, **_rope("dynamic", factor=4.0)}
    ),
    "llama-rope-yarn": Variant(
        "Llama", _rope("yarn", factor=8.0, original_max_position_embeddings=64)
    ),
    "mistral": Variant("Mistral", {"sliding_window": None, "num_hidden_layers": 3}),
    "mistral-window": Variant("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": Variant("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Variant(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": Variant("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-untied-biased": Variant("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "llama-bf16": Variant("Llama", dtype="bfloat16"),
    "qwen3-bf16": Variant("Qwen3", {"head_dim": 32}, dtype="bfloat16"),
    "llama-fp16": Variant("Llama", dtype="float16"),
}


def make_model_folder(folder: Path, variant: Variant, *, seed: int = 7) -> Path:
    """Write weights, configuration and tokenizer with `save_pretrained`."""
    if variant.towers is not None:
        text = replace(variant, towers=None)
        return _wrap_text_model(make_model_folder(folder, text, seed=seed), variant.towers)
    model = _new_model(variant, seed)
    shard_size = "60KB" if variant.is_sharded else "1GB"
    model.save_pretrained(folder, max_shard_size=shard_size)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, special_tokens: Sequence[str] = ()) -> None:
    """Write a byte-level BPE tokenizer with a few merges, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>", *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINED_ON], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder)


def _wrap_text_model(folder: Path, towers: Towers) -> Path:
    """Write the folder of a text model as that of a model with towers."""
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = ("dtype", "tie_word_embeddings")
    outer = {name: text[name] for name in names} | {**towers.fields, "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    wrapped = {
        re.sub(r"^model\.", "model.language_model.", name): tensor
        for name, tensor in tensors.items()
    }
    wrapped |= {name: torch.zeros(2, 2) for name in towers.tensors}
    save_file(wrapped, folder / "model.safetensors")
    return folder


@cache
def import_transformers() -> Any:
    """Import and return transformers, which takes seconds and most unit tests do not need."""
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@cache
def reference(folder: Path) -> Any:
    """Return the model as loaded by transformers."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = "ImageTextToText" if "text_config" in config else "CausalLM"
    loader = getattr(import_transformers(), f"AutoModelFor{kind}")
    return loader.from_pretrained(folder, dtype="auto").eval()


def reference_greedy(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the tokens that transformers generates greedily, without an end token."""
    return list(_generated(folder, tuple(prompt), num_tokens))


@cache
def _generated(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model = fresh_rope(reference(folder))
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
    return tuple(answer[0, len(prompt) :].tolist())


def reference_choices(
    folder: Path, prompt: Sequence[int], answer: Sequence[int], num_tokens: int
) -> list[int]:
    """Return the likeliest token at each place of an answer, from one forward pass over it.

    The result equals the answer if and only if this is the greedy one of `num_tokens` tokens.
    """
    if _is_dynamic(reference(folder)):  # another function for each length of the whole
        return reference_greedy(folder, prompt, num_tokens)
    before = answer[: num_tokens - 1]
    logits = _reference_logits(folder, (*prompt, *before))
    choices: list[int] = logits[len(prompt) - 1 :].argmax(dim=1).tolist()
    return choices


def reference_logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return logprobs of shape [tokens, vocab_size]; row i predicts token i + 1."""
    return _reference_logits(folder, tokens).float().log_softmax(dim=-1)


def _reference_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    model = fresh_rope(reference(folder))
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


def _is_dynamic(model: Any) -> bool:
    """Return whether the angles of all tokens depend on the length of the sequence."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    return rope.get("rope_type") == "dynamic"


def half_reference_logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logprob in bfloat16 of each token but the first, given those before it."""
    model = fresh_rope(deepcopy(reference(folder)).bfloat16())
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    chosen = torch.tensor(list(tokens[1:]))[:, None]
    return logits[:-1].float().log_softmax(dim=-1).gather(1, chosen)[:, 0]


def fresh_rope(model: Any) -> Any:
    """Reset a dynamic rope, which otherwise keeps the longest sequence length it has seen."""
    rope: Any = getattr(getattr(model, "model", None), "rotary_emb", None)
    if not hasattr(rope, "original_inv_freq"):
        return model
    rope.inv_freq.data = rope.original_inv_freq.clone()
    rope.max_seq_len_cached = rope.original_max_seq_len
    return model


def prompt_of(length: int, *, seed: int = 0) -> tuple[int, ...]:
    """Return random tokens without special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    drawn = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
    return tuple(drawn.tolist())


def _new_model(variant: Variant, seed: int) -> Any:
    settings = {**SMALL, **variant.settings}
    name, suffix = variant.family, "ForCausalLM"
    if variant.vision is not None:
        outer = {name: settings[name] for name in ("tie_word_embeddings",) if name in settings}
        settings = {"text_config": settings, "vision_config": dict(variant.vision), **outer}
        suffix = "ForConditionalGeneration"
    transformers = import_transformers()
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, variant.model_class or name + suffix)(config)
    _make_all_parameters_count(model)
    # Casting the complex buffers of Llama 4's image part warns.
    return model if variant.dtype == "float32" else model.to(getattr(torch, variant.dtype))


def _make_all_parameters_count(model: Any) -> None:
    # Some start as ones, zeros or uninitialised, and a loader that mixed them up would not show.
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith(("bias", "sinks")) and parameter.is_floating_point():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            if (".experts." in name and parameter.ndim == 3) or name.endswith("router.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.25)
            if name.endswith("modality_router.weight"):  # of inputs as small as 1 / hidden_size
                parameter.copy_(torch.randn_like(parameter) * 2)
            if name.endswith(("A_log", "mamba.D")):
                parameter.copy_(torch.randn_like(parameter))
            if name.endswith(("conv1d.weight", "conv.conv.weight")):
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            if name.endswith(("layer_scalar", "router.scale", "per_expert_scale", "output_scale")):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.25)


def _write_tokenizer_config(folder: Path) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
