"""Ranks that compute nothing, for tests of their processes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.ranks.processes import UNWATCHED, OnEnd, RankProcesses, RankWatch
from tests.support import rank_program

PROGRAM = rank_program.__name__


def start_ranks(
    model: str,
    num_ranks: int = 2,
    on_end: OnEnd = lambda _: None,
    program: str = PROGRAM,
    cpus: Sequence[frozenset[int] | None] | None = None,
    watch: RankWatch = UNWATCHED,
) -> RankProcesses:
    """Start ranks that compute nothing; see `rank_program` for models."""
    config = RunnerConfig(model=model, tensor_parallel_size=num_ranks)
    return RankProcesses(config, os.memfd_create("links"), on_end, program, cpus, watch)
