"""What stands at the end of each command's `--help`: lines to try."""

from __future__ import annotations

from collections.abc import Callable

EXAMPLES = {
    "up": (
        "baton up --model models/demo --prefill 1 --decode 2",
        "baton up --model Qwen/Qwen3-0.6B --kv-cache-memory 2GiB --policy least_loaded --port 0",
    ),
    "demo": ("baton demo",),
    "generate": (
        'baton generate "def read_config(path):" --max-tokens 64 --timings',
        "cat question.txt | baton generate --json --logprobs 5 --seed 7",
    ),
    "chat": ('baton chat --system "Be brief."', "cat questions.txt | baton chat --temperature 0"),
    "nodes": ("baton nodes", "baton nodes --once --json | jq '.nodes[].state'"),
    "run": (
        'baton run "import os" "import sys" --max-tokens 32',
        "baton run --model ~/models/mine < prompt.txt",
    ),
    "doctor": (
        "baton doctor",
        "baton doctor --model Qwen/Qwen3-0.6B --kv-cache-memory 2GiB --json",
    ),
    "health": ("baton health 127.0.0.1:50051",),
}


def examples_of(command: Callable[..., None]) -> str | None:
    lines = EXAMPLES.get(command.__name__)
    return examples(*lines) if lines else None


def examples(*lines: str) -> str:
    return "\n".join(["[bold]Examples[/]", *(f"  {line}" for line in lines)])
