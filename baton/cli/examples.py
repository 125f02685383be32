"""Example command lines at the end of each command's `--help`."""

from __future__ import annotations

EXAMPLES = {
    "up": (
        "baton up --model models/demo --prefill 1 --decode 2",
        "baton up --model Qwen/Qwen3-0.6B --embed Qwen/Qwen3-Embedding-0.6B",
    ),
    "demo": ("baton demo",),
    "generate": (
        'baton generate "def read_config(path):" --max-tokens 64 --timings',
        "cat question.txt | baton generate --json --logprobs 5 --seed 7",
    ),
    "chat": ('baton chat --system "Be brief."', "cat questions.txt | baton chat --temperature 0"),
    "embed": (
        'baton embed "the quick brown fox" "a slow dog"',
        "baton embed --dimensions 256 < texts.txt > vectors.jsonl",
    ),
    "nodes show": ("baton nodes", "baton nodes show --once --json | jq '.nodes[].state'"),
    "reset-prefix-cache": ("baton reset-prefix-cache --address 127.0.0.1:50051",),
    "run": (
        'baton run "import os" "import sys" --max-tokens 32',
        'baton run --chat "Who was Ada Lovelace?" --model ~/models/mine',
        "baton run --model ~/models/mine < prompt.txt",
    ),
    "health": ("baton health 127.0.0.1:50051",),
    "doctor": (
        "baton doctor",
        "baton doctor --model Qwen/Qwen3-0.6B --kv-cache-memory 2GiB --json",
    ),
    "serve prefill": (
        "baton serve prefill --model models/demo --port 50061",
        "baton --config cluster.toml serve prefill --cpus 0-7",
    ),
    "serve decode": (
        "baton serve decode --model models/demo --port 50071",
        "baton serve decode --model models/demo --kv-cache-memory 4GiB --max-num-seqs 64",
    ),
    "serve encode": ("baton serve encode --model ~/models/vision --port 50081",),
    "serve router": (
        "baton serve router --prefill-nodes 127.0.0.1:50061 --decode-nodes 127.0.0.1:50071",
        "baton serve router --model models/demo --decode-nodes dns:///decode:50071",
    ),
    "bench serve": (
        "baton bench serve --address 127.0.0.1:50051 --rates 1,2,4,8 --plots plots",
        "baton bench serve --model models/demo --compare colocated --prompt-tokens mix:32x9,768x1",
    ),
}


def examples_of(command: str) -> str | None:
    lines = EXAMPLES.get(command)
    return examples(*lines) if lines else None


def examples(*lines: str) -> str:
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])
