"""Tokenizers of real GGUF files: the tokens of transformers and of llama.cpp, and back.

`make test` compares digests of tokens that were those of transformers and of llama.cpp.
`BATON_TOKENIZER_LINES=10000` compares so many lines with transformers, and with llama.cpp if
`BATON_LLAMA_PYTHON` names an interpreter that has llama-cpp-python.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.tokenizer import Tokenizer
from tests.support.mixed_text import mixed_lines, real_lines
from tests.support.real_models import gemma3, smollm2

pytestmark = pytest.mark.slow
NUM_LINES = int(os.environ.get("BATON_TOKENIZER_LINES", "0"))
LLAMA_PYTHON = os.environ.get("BATON_LLAMA_PYTHON", "")
FILES: dict[str, Callable[[], Path]] = {"smollm2": smollm2, "gemma3": gemma3}
# Of the tokens and texts of the first 2,000 generated lines.
NUM_DIGESTED = 2000
DIGESTS = {
    "smollm2": "bd599c27d823bafe0e5b368572d0da5ed3b5b017b266ba2ed418063e0f2f9f6f",
    "gemma3": "439f7b14765399a8fe76a4f166fdff9fe41552f5333fce53e720920837fb47f8",
}
# Where transformers and llama.cpp differ in spaces, Baton is as llama.cpp: Gemma's vocabulary has
# tokens of spaces, which transformers also finds in texts with U+2581, and merges instead of
# matching the longest one.
SPACES = re.compile("[ \u2581]{32}|\u2581\u2581|\u2581 | \u2581")
# SmolLM2's vocabulary lacks some bytes: llama.cpp does not merge what is around them, as
# transformers does, and so does Baton.
LACKING = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")
needs_lines = pytest.mark.skipif(not NUM_LINES, reason="BATON_TOKENIZER_LINES is not set")
needs_llama = pytest.mark.skipif(not LLAMA_PYTHON, reason="BATON_LLAMA_PYTHON is not set")


@pytest.fixture(scope="module", params=FILES)
def model_file(request: pytest.FixtureRequest) -> Path:
    return FILES[request.param]()


@pytest.fixture(scope="module")
def tokenizer(model_file: Path) -> Tokenizer:
    return open_checkpoint(str(model_file)).load_tokenizer()


def lines() -> list[str]:
    return mixed_lines(NUM_LINES // 2) + real_lines(NUM_LINES - NUM_LINES // 2)


def tokens_and_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[list[int], str]]:
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [(ids, tokenizer.decode(ids, skip_special_tokens=False)) for ids in encoded]


def of_llama_cpp(path: Path, texts: Sequence[str]) -> list[tuple[list[int], str]]:
    """Return tokens and texts by llama.cpp, in a process of its own."""
    program = Path(__file__).parents[1] / "support" / "llama_cpp_tokens.py"
    command = (LLAMA_PYTHON, str(program), str(path))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        command,
        input=json.dumps(texts),
        text=True,
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
    )
    return [(token_ids, text) for token_ids, text in json.loads(found.stdout)]


def test_tokens_and_texts_have_not_changed(
    tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    found = json.dumps(tokens_and_texts(tokenizer, mixed_lines(NUM_DIGESTED)))

    name = request.node.callspec.params["model_file"]
    assert hashlib.sha256(found.encode()).hexdigest() == DIGESTS[name]


@needs_lines
def test_tokens_and_texts_are_those_of_transformers(tokenizer: Tokenizer, model_file: Path) -> None:
    reference = AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    backend = reference.backend_tokenizer
    if "SmolLM2" in model_file.name:
        # transformers does not know its pre-tokenizer, and takes GPT-2's.
        steps = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    texts = [text for text in lines() if "gemma" not in model_file.name or not SPACES.search(text)]

    found = tokens_and_texts(tokenizer, texts)

    encoded = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    expected = [(ids, backend.decode(ids, skip_special_tokens=False)) for ids in encoded]
    assert not differences(found, expected, texts)
    assert len(texts) > 0.9 * NUM_LINES


@needs_lines
@needs_llama
def test_tokens_and_texts_are_those_of_llama_cpp(tokenizer: Tokenizer, model_file: Path) -> None:
    texts = [text for text in lines() if "Smol" not in model_file.name or not LACKING.search(text)]

    found = tokens_and_texts(tokenizer, texts)

    assert not differences(found, of_llama_cpp(model_file, texts), texts)
    assert len(texts) > 0.8 * NUM_LINES


def differences(
    found: Sequence[tuple[list[int], str]],
    expected: Sequence[tuple[list[int], str]],
    texts: Sequence[str],
) -> Sequence[tuple[str, object, object]]:
    """Return the first few texts with other tokens, or other texts of the same tokens."""
    together = zip(texts, found, expected, strict=True)
    return [(text, mine, other) for text, mine, other in together if tuple(mine) != tuple(other)][
        :5
    ]
