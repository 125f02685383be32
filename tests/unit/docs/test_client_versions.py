"""Versions of clients that the pages name."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", "docs/openai.md", "docs/messages.md", "docs/responses.md")
# First cells of tables: names with a version each, or in the README names and then versions.
NAMED = re.compile(r"([A-Za-z][A-Za-z -]*?) (\d+(?:\.\d+)+)(?=[ ,|(])")
MODELS = {"Qwen"}
LISTED = re.compile(r"^\| ([A-Za-z][^|]*?) \| (\d+(?:\.\d+)+(?:, \d+(?:\.\d+)+)*) \|", re.MULTILINE)


def versions_of_clients() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for names, versions in LISTED.findall(text):
            for name, version in zip(names.split(", "), versions.split(", "), strict=False):
                found[name].add(version)
        for cell in re.findall(r"^\| ([^|]*\|)", text, re.MULTILINE):
            for name, version in NAMED.findall(cell):
                found[name.strip()].add(version)
    return {name: versions for name, versions in found.items() if name not in MODELS}


def test_all_pages_name_one_version_of_a_client() -> None:
    found = versions_of_clients()

    assert {"openai", "anthropic", "langchain-openai", "litellm", "Codex"} <= found.keys()
    assert {name: found[name] for name in found if len(found[name]) > 1} == {}


def test_clients_of_the_tests_have_the_version_that_is_installed() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]
    )
    named = {name: found for name, found in versions_of_clients().items() if name in pins}

    assert {
        name for name, found in named.items() for one in found if not pins[name].startswith(one)
    } == set()
