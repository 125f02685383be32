"""Peer process of a benchmark: runs in its own virtual environment, and measures on request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.core.errors import NamedError
from benchmarks.peers.settings import clean_environment, python_of
from benchmarks.processes import external_process

MARK = "BATON "


class PeerFailed(NamedError):
    """A peer process ended before it answered: it cannot run the model, for example."""


class PeerProcess:
    """Peer process behind two pipes, frozen with its children between requests.

    vLLM's workers spin for a second when idle, which would slow the measurement of others.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self._name = name
        self._process = process
        self._log = log
        self._answer()  # wait until it is ready
        os.killpg(process.pid, signal.SIGSTOP)

    def request(self, **fields: object) -> str:
        os.killpg(self._process.pid, signal.SIGCONT)
        if self._process.stdin is not None:
            # `_answer` reports a process that has ended. A buffered write would fail later.
            with suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), (json.dumps(fields) + "\n").encode())
        answer = self._answer()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return answer

    def _answer(self) -> str:
        # Engines write their own lines to the same pipe.
        for line in self._process.stdout or ():
            if line.startswith(MARK):
                return line.removeprefix(MARK).strip()
        reason = _last_line(self._log)
        raise PeerFailed(f"{self._name} ended with code {self._process.wait()}{reason}")


@contextmanager
def start_peer(
    venv: Path, script: Path, settings: Mapping[str, object], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a virtual environment within the block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python_of(venv)), str(script), json.dumps(settings)]
    with (
        log.open("w", encoding="utf-8") as file,
        external_process(
            command,
            clean_environment() | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file.fileno(),
        ) as process,
    ):
        yield process


def _last_line(log: Path) -> str:
    """Return the last line of a log after a colon, or nothing."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
