"""Ranks of engines of the test process that are forked, which saves them the imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from baton.cli.forking import set_title
from baton.engine.runner.ranks import processes
from tests.support.fork_server import PYTHON, SERVERS, ForkedProcess

FORKED_RANK = "tests.support.forked_ranks"


class ForkedRank(ForkedProcess):
    """Popen of a rank's command line."""

    def __init__(self, command: Sequence[str], **settings: Any) -> None:
        _, _, program, _, first_pid = command
        super().__init__(SERVERS, [*PYTHON, FORKED_RANK, program, first_pid], **settings)


def fork_ranks(set_attribute: Callable[[object, str, object], object]) -> None:
    """Fork the ranks of engines that this process opens."""
    forking = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL)
    set_attribute(processes, "subprocess", forking)


def main() -> None:
    """Run the program of a rank. The server has put the connection's descriptor last."""
    program, first_pid, fd = sys.argv[1:]
    sys.argv[1:] = [fd, first_pid]
    set_title([program])  # by which tests find ranks
    import_module(program).main()
