"""SIGTERM to a process that does not serve yet."""

from __future__ import annotations

import subprocess
import sys

TOLD_WHILE_IT_LOADS = """
import os, signal
from baton.rpc.process_end import exit_on_sigterm
exit_on_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
print("went on")
"""


def test_sigterm_before_serving_ends_a_process_by_its_own_handler() -> None:
    # The kernel drops signals without a handler for the first process of a container; anywhere
    # else only the exit code shows that the handler ran.
    ended = subprocess.run([sys.executable, "-c", TOLD_WHILE_IT_LOADS], capture_output=True)

    assert (ended.returncode, ended.stdout) == (143, b"")
