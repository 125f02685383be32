"""Random encoders of each family, written with transformers, and its own results for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn import functional

from baton.core.vectors import Floats
from baton.engine.runner.model.layer_norm import LayerNorm
from tests.support.models import import_transformers, save_tokenizer

VOCAB_SIZE = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class EncoderVariant(NamedTuple):
    """An encoder as transformers names it, and the settings that differ from `SIZES`."""

    name: str
    settings: dict[str, Any]


ENCODERS = {
    "bert": EncoderVariant("Bert", {"hidden_act": "gelu_new"}),
    "roberta": EncoderVariant("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": EncoderVariant("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 3}),
    "modernbert": EncoderVariant(
        "ModernBert", {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2}
    ),
    "modernbert-biased": EncoderVariant(
        "ModernBert",
        {
            "local_attention": 24,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
        },
    ),
}


def make_encoder(folder: Path, kind: str, ending: str = "Model", **settings: Any) -> Any:
    """Write a random model with `save_pretrained`, and return it."""
    transformers = import_transformers()
    torch.manual_seed(len(kind))
    name, own = ENCODERS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, **settings})
    model = getattr(transformers, f"{name}{ending}")(config).eval()
    for parameter in model.parameters():  # biases are 0 and norms 1 otherwise
        with torch.no_grad():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    _add_special_tokens(folder / "tokenizer.json")
    return model


def _add_special_tokens(path: Path) -> None:
    """Let the tokenizer mark texts and pairs as BERT's does."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    tokenizer.save(str(path))


def pooled(model: Any, text: Sequence[int], kind: str) -> Floats:
    """Return the embedding of a text, of length one."""
    with torch.no_grad():
        states = model(torch.tensor([text])).last_hidden_state[0].float()
    vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]
    found: Floats = functional.normalize(vector, dim=0).numpy()
    return found


def tokenize_pair(folder: Path, *texts: str, max_length: int) -> Any:
    """Return a text or a pair as transformers tokenizes it."""
    fast = import_transformers().PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    fast.model_input_names = ["input_ids", "token_type_ids"]
    return fast(*texts, truncation="longest_first", max_length=max_length)


def scored(model: Any, text: Sequence[int], second: int) -> Floats:
    """Return the scores of the labels of a pair whose second text begins at `second`."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([text])}
    if second and model.config.model_type == "bert":
        inputs["token_type_ids"] = (torch.arange(len(text)) >= second).long()[None]
    with torch.no_grad():
        logits = model(**inputs).logits[0].float()
    found: Floats = (logits.sigmoid() if len(logits) == 1 else logits.softmax(0)).numpy()
    return found


def a_layer_norm(size: int) -> LayerNorm:
    return LayerNorm(torch.ones(size), torch.zeros(size), 1e-12)
