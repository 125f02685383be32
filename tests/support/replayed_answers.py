"""Replay of canitoolcall's fixtures, raw outputs of models, by the parsers of answers."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.router.text_events.events import AnswerText, TextEvent, fold
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.values import Parsing

NUM_RANDOM_SPLITS = 5
# By family and, where it matters, by a part of the reference model's name.
PARSINGS: Mapping[str, Sequence[tuple[str, Parsing]]] = {
    "deepseek": (
        ("V3-0324", Parsing("deepseek_v3", "deepseek_v3")),
        ("V3.1", Parsing("deepseek_v31", "deepseek_v3")),
        ("V3.2", Parsing("deepseek_v32", "deepseek_v3")),
        ("V4-", Parsing("deepseek_v4", "deepseek_v3")),
        ("V4.1", Parsing("deepseek_v41", "deepseek_v3")),
    ),
    "gemma4": (("", Parsing("gemma4", "gemma4")),),
    "glm": (("", Parsing("glm45", "glm45")),),
    "gpt-oss": (("", Parsing("openai", "openai_gptoss")),),
    "kimi": (
        ("Kimi-K2", Parsing("kimi_k2", "kimi_k2")),
        ("Kimi-K3", Parsing("kimi_k3", "kimi_k3")),
    ),
    "llama": (("Llama-4", Parsing("llama4_pythonic")), ("", Parsing("llama3_json"))),
    "mistral": (
        ("Magistral-Small-2506", Parsing("mistral", "qwen3")),
        ("", Parsing("mistral", "mistral")),
    ),
    "qwen3-hermes": (("", Parsing("hermes", "qwen3")),),
    "qwen3-xml": (("", Parsing("qwen3_xml", "qwen3")),),
}


def parsing_of(family: str, model: str) -> Parsing | None:
    """Return the formats of a model, None if Baton does not have them."""
    rows = PARSINGS.get(family, ())
    return next((parsing for part, parsing in rows if part in model), None)


def replay(
    chunks: Sequence[str],
    parsing: Parsing,
    tools: Sequence[Mapping[str, Any]],
    prompt_end: str,
    *,
    is_cut_off: bool,
) -> AnswerText:
    """Return the answer that the chunks of a text fold to."""
    parser = TextFormat(parsing, ToolCallMode.BY_MODEL, tools=tools).parser(prompt_end)
    events: list[TextEvent] = []
    for chunk in chunks:
        events += parser.push(chunk)
    return fold([*events, *parser.finish(is_cut_off=is_cut_off)])


def splits_of(text: str) -> list[list[str]]:
    """Return ways to split a text, as tokenizers and as no tokenizer would."""
    words = re.findall(r"<[|/]?[^<>]*>|\[/?[A-Z_]+\]|\w+|\s+|.", text, re.DOTALL)
    splits = [[text], list(text), words]
    for seed in range(NUM_RANDOM_SPLITS):
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 1 + len(text) // 8)))
        pairs = zip([0, *cuts], [*cuts, len(text)], strict=True)
        splits.append([text[first:end] for first, end in pairs])
    return splits
