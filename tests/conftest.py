"""Session fixtures of all tests: trace folder and SIGINT handler."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from baton.cli.telemetry import TRACE_DIR_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def _traces_go_to_a_folder_of_the_tests(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    before = os.environ.get(TRACE_DIR_VARIABLE)
    os.environ[TRACE_DIR_VARIABLE] = str(tmp_path_factory.mktemp("traces"))
    yield
    os.environ.pop(TRACE_DIR_VARIABLE)
    if before is not None:
        os.environ[TRACE_DIR_VARIABLE] = before


@pytest.fixture(scope="session", autouse=True)
def _interrupts_are_heard() -> None:
    """Restore SIGINT, which a shell makes background processes and their children ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
