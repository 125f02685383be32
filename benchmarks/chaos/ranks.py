"""Processes of further ranks that nodes have started, found from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROGRAM = "baton.engine.runner.ranks.following"


def ranks_of(process_id: int, program: str = PROGRAM) -> list[int]:
    """Return the processes of further ranks that a process has started and that run."""
    return [child for child in _children(process_id) if program in _command(child)]


def is_running(process_id: int) -> bool:
    """Return whether a process exists that has not ended: zombies have."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X")


def _children(process_id: int) -> Iterator[int]:
    """Yield the children of all threads."""
    for listed in Path(f"/proc/{process_id}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            yield from map(int, listed.read_text(encoding="ascii").split())


def _command(process_id: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process_id}/cmdline").read_text(encoding="utf-8", errors="replace")
    return ""
