"""Prints a vocabulary's tokens and texts by llama.cpp. Runs where llama-cpp-python is installed.

python llama_cpp_tokens.py FILE.gguf < lines.json
"""

from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp


def main(path: str) -> None:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    answers = []
    for line in json.load(sys.stdin):
        token_ids = model.tokenize(line.encode(), add_bos=False, special=True)
        answers.append((token_ids, _text(model, token_ids, 16 * len(line.encode()) + 64)))
    json.dump(answers, sys.stdout)


def _text(model: llama_cpp.Llama, token_ids: list[int], max_bytes: int) -> str:
    """Return the text of tokens. The package's own method drops tokens of more than 32 bytes."""
    buffer = ctypes.create_string_buffer(max_bytes)
    tokens = (llama_cpp.llama_token * len(token_ids))(*token_ids)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    arguments = (vocabulary, tokens, len(token_ids), buffer, max_bytes, False, True)
    num_bytes = llama_cpp.llama_detokenize(*arguments)
    return buffer.raw[:num_bytes].decode(errors="replace")


if __name__ == "__main__":
    main(sys.argv[1])
