"""Processes of the ranks of a node, as tests find and start them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.ranks.processes import OnEnd, RankProcesses
from tests.support import rank_program

PROGRAM = rank_program.__name__


def start_ranks(
    model: str, num_ranks: int = 2, on_end: OnEnd = lambda _: None, program: str = PROGRAM
) -> RankProcesses:
    """Start ranks that compute nothing; see `rank_program` for models."""
    config = RunnerConfig(model=model, tensor_parallel_size=num_ranks)
    return RankProcesses(config, os.memfd_create("links"), on_end, program)


def ranks_of(process_id: int) -> list[int]:
    """Return the processes of further ranks that a process has started and that run."""
    lists = Path(f"/proc/{process_id}/task").glob("*/children")
    children = [int(child) for each in lists for child in each.read_text(encoding="ascii").split()]
    return [child for child in children if _is_rank(child)]


def is_running(process_id: int) -> bool:
    """Return whether a process exists that has not ended: zombies have."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X")


def _is_rank(process_id: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        command = Path(f"/proc/{process_id}/cmdline").read_bytes()
        return b"ranks.following" in command or PROGRAM.encode() in command
    return False
