"""Links in the pages at the top of the repository. `make docs` checks those of docs/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# The path of a relative link, without its anchor.
TARGET = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_every_relative_link_refers_to_an_existing_file(page: Path) -> None:
    targets = TARGET.findall(page.read_text(encoding="utf-8"))

    assert [target for target in targets if not (ROOT / target).exists()] == []
