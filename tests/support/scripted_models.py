"""Model folders whose answers are written in advance: real models, real tokens, real weights.

The last token of a prompt decides about the answer, and each of its tokens about the next one. The
chat template chooses the last token, by what it finds in the conversation. The models take images,
which are encoded and have no effect on the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from tests.support.models import EOS_TOKEN_ID, import_transformers, save_tokenizer
from tests.support.vision import IMAGE_MARKS, VISION_VARIANTS, write_image_settings

HIDDEN_SIZE = 256  # each token of a script has a dimension of its own, all others share one
PEAK = 100.0  # logit of the next token; all others have 0
WORDS = re.compile(r"\s*\S{1,8}\s*")


def make_scripted_folder(
    folder: Path, answers: Mapping[str, str], chat_template: str, *, max_model_len: int = 1 << 18
) -> Path:
    """Write a model that answers a prompt whose last token is a key with the key's text."""
    save_tokenizer(folder, IMAGE_MARKS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(key, special=True) for key in answers])
    next_token: dict[int, int] = {}
    for key, text in answers.items():
        before = _id_of(tokenizer, key)
        for piece in _pieces(text, taken={*answers, *tokenizer.get_vocab()}):
            tokenizer.add_tokens([AddedToken(piece, normalized=False)])
            following = _id_of(tokenizer, piece)
            next_token[before] = before = following
        next_token[before] = EOS_TOKEN_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    _save_model(folder, tokenizer.get_vocab_size(), next_token, max_model_len)
    config = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**settings, "chat_template": chat_template}), encoding="utf-8")
    write_image_settings(folder)
    return folder


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def _pieces(text: str, taken: set[str]) -> list[str]:
    """Split a text into pieces that are no tokens yet, so that each has one successor."""
    pieces, rest = [], ""
    for word in WORDS.findall(text):
        rest += word
        if rest not in taken:
            taken.add(rest)
            pieces.append(rest)
            rest = ""
    if rest:
        pieces[-1] += rest
    assert "".join(pieces) == text
    return pieces


def _save_model(
    folder: Path, vocab_size: int, next_token: Mapping[int, int], max_model_len: int
) -> None:
    assert len(next_token) < HIDDEN_SIZE
    transformers = import_transformers()
    text = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": max_model_len,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    vision = VISION_VARIANTS["smolvlm"].vision
    config = transformers.SmolVLMConfig(text_config=text, vision_config=vision)
    torch.manual_seed(7)
    model = transformers.SmolVLMForConditionalGeneration(config)
    decoder = model.model.text_model
    with torch.no_grad():
        for layer in decoder.layers:  # computed and transferred, and without effect
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = decoder.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()[:, 0] = 1.0
        head.zero_()[EOS_TOKEN_ID, 0] = PEAK
        for dimension, (token, following) in enumerate(next_token.items(), 1):
            embedding[token, 0] = 0.0
            embedding[token, dimension] = 1.0
            head[following, dimension] = PEAK
    model.save_pretrained(folder)
