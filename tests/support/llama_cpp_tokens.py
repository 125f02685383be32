"""Prints a vocabulary's tokens and texts by llama.cpp. Runs where llama-cpp-python is installed.

python llama_cpp_tokens.py FILE.gguf < lines.json
"""

from __future__ import annotations

import json
import sys

import llama_cpp


def main(path: str) -> None:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    answers = []
    for line in json.load(sys.stdin):
        token_ids = model.tokenize(line.encode(), add_bos=False, special=True)
        text = model.detokenize(token_ids, special=True)
        answers.append((token_ids, text.decode(errors="replace")))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
