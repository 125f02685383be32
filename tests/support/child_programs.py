"""Programs that a test starts and that end with it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def running_program(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and kill it at the end of the block if it still runs."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            yield program
        finally:
            program.kill()
