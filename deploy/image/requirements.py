"""Prints a list of requirements in pyproject.toml, one per line, for pip."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any


def main(dotted_name: str) -> None:
    found: Any = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
    for part in dotted_name.split("."):
        found = found[part]
    print(*found, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
