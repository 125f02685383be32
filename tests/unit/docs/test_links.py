"""Links and names of files in the pages. `make docs` also checks anchors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# The path of a relative link, without its anchor.
TARGET = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_refers_to_an_existing_file(page: Path) -> None:
    targets = TARGET.findall(page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = (ROOT / "docs/index.md").read_text(encoding="utf-8").splitlines()

    assert {page.stem for page in ROOT.glob("docs/*.md")} - {"index", *listed} == set()


# A file of Python in backticks, with as much of its path as the page gives.
NAMED_FILE = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`")
NOT_IN_ROOMS = ("/setup.py", "/text.py")  # the latter is a user's own, in an example
POLL = re.compile(r"self\.(_\w+)\.poll\(")


def test_every_python_file_that_a_page_names_exists() -> None:
    rooms = (path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = (path for room in rooms for path in room.rglob("*.py"))
    files = [f"/{path.relative_to(ROOT)}" for path in found] + list(NOT_IN_ROOMS)
    missing = {
        (page.name, name)
        for page in PAGES
        for name in NAMED_FILE.findall(page.read_text(encoding="utf-8"))
        if page.name != "CHANGELOG.md" and not any(file.endswith(f"/{name}") for file in files)
    }

    assert missing == set()


def test_the_step_on_the_engines_page_polls_what_the_code_polls() -> None:
    page = (ROOT / "docs/architecture-engine.md").read_text(encoding="utf-8")
    code = (ROOT / "engine/core.py").read_text(encoding="utf-8")

    assert POLL.findall(page) == POLL.findall(code)
