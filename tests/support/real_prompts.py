"""Prompts for real language models."""

from __future__ import annotations

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Dear Ms. Lovelace,\n\n",
    "Q: How many legs does a spider have?\nA:",
    "The three laws of motion are:\n1.",
    "import numpy as np\n\ndef softmax(x):\n",
    "Der Hund läuft",
    "Ingredients for pancakes:\n-",
    "In 1969, the first humans",
    "SELECT name, age FROM users WHERE",
    "The opposite of hot is",
    "# Installation\n\nTo install the package, run",
    "Photosynthesis is the process by which",
    "1, 1, 2, 3, 5, 8, 13,",
    "“To be, or not to be,",
    "The quick brown fox",
    "Roses are red,\nviolets are blue,\n",
)
PASSAGE = (
    "A router assigns requests to prefill nodes, which compute the keys and values of a prompt. "
    "They write them into memory of a decode node, which generates the answer token by token. "
    "So long prompts do not delay the tokens of other requests. "
)


def long_text(num_passages: int = 14) -> str:
    """Return a text of more than 40 tokens for each passage: by default longer than a window."""
    passages = (f"{number}. {PASSAGE}" for number in range(1, num_passages + 1))
    return "".join(passages) + "In one sentence:"
