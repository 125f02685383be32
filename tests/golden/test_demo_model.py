"""Demo model: complete folder, correct model card and plausible Python."""

import hashlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

FOLDER = Path(__file__).resolve().parents[2] / "models" / "demo"
MAX_FOLDER_BYTES = 8_000_000

# Written for this test, so that it is in no text the model has seen.
UNSEEN = '''class Basket:
    """A basket of fruit that is counted by name."""

    def __init__(self, name, size=10):
        self.name = name
        self.size = size
        self._items = []

    def add(self, item):
        if len(self._items) >= self.size:
            raise ValueError("the basket %r is full" % self.name)
        self._items.append(item)
        return len(self._items)

    def __len__(self):
        return len(self._items)
'''
# 2.02 when the weights were made; about 7.6 for an untrained model.
MAX_LOSS = 2.4


@pytest.fixture(scope="module")
def model() -> Any:
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_folder_is_complete_and_small() -> None:
    names = {path.name for path in FOLDER.iterdir()}

    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "LICENSE-PYTHON.txt",
    }
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_FOLDER_BYTES


def test_the_weights_are_those_that_the_card_describes() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")

    named = re.search(r"sha256 of `model.safetensors` \| `([0-9a-f]{64})`", card)

    assert named is not None
    assert named[1] == hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()


def test_config_tokenizer_and_weights_are_consistent(model: Any, tokenizer: Tokenizer) -> None:
    config = model.config

    assert (
        tokenizer.get_vocab_size()
        == config.vocab_size
        == model.get_input_embeddings().num_embeddings
    )
    assert tokenizer.token_to_id("<|begin|>") == config.bos_token_id
    assert tokenizer.token_to_id("<|end|>") == config.eos_token_id
    assert config.num_key_value_heads < config.num_attention_heads
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "text",
    [UNSEEN, "", "\n\n    \tx  \n", "naïve café, 你好, 🥖\r\n", "<not special>", "\x00\x7f"],
)
def test_any_text_round_trips_through_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids

    assert tokenizer.decode(ids) == text
    assert ids[0] == tokenizer.token_to_id("<|begin|>")


def test_a_chat_is_rendered_with_one_begin_token() -> None:
    chat = [
        {"role": "user", "content": "def f(x):\n"},
        {"role": "assistant", "content": "    return x\n"},
    ]

    rendered = AutoTokenizer.from_pretrained(FOLDER).apply_chat_template(chat, tokenize=False)

    assert rendered == "<|begin|>def f(x):\n    return x\n"


def test_the_perplexity_of_unseen_python_is_low(model: Any, tokenizer: Tokenizer) -> None:
    tokens = torch.tensor([tokenizer.encode(UNSEEN).ids])

    with torch.inference_mode():
        logits = model(tokens[:, :-1]).logits.float()
    loss = functional.cross_entropy(logits[0], tokens[0, 1:]).item()

    assert loss < MAX_LOSS, f"{loss:.3f}, that is perplexity {math.exp(loss):.1f}"
