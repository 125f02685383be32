"""Program in a pseudo-terminal: typed input and displayed output."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tests.support.fork_server import SERVERS, ForkedProcess, can_fork

CTRL_C, CTRL_D = "\x03", "\x04"
# Makes the terminal the controlling one, and restores SIGINT, which shells make background
# processes ignore.
IN_TERMINAL = (
    "import fcntl, os, signal, sys, termios;"
    "signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
GIVE_UP_S = 120.0


class Terminal:
    """Program in a terminal. It is ended at the end of the block."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
        *,
        is_forked: bool = True,
    ) -> None:
        """`is_forked` allows a fork of a server that has imported `baton`."""
        self._screen, theirs = pty.openpty()
        streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
        streams["env"] = {**os.environ, "TERM": "xterm", **environment}
        if is_forked and can_fork(command):
            self.process: subprocess.Popen[Any] = ForkedProcess(SERVERS, command, **streams)
        else:
            in_terminal = [sys.executable, "-c", IN_TERMINAL, *command]
            self.process = subprocess.Popen(in_terminal, start_new_session=True, **streams)
        os.close(theirs)
        self._shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._screen)

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def await_text(self, wanted: str) -> str:
        """Wait for a text; return the output since the last wait, including it."""
        give_up_s = time.monotonic() + GIVE_UP_S
        while wanted not in self._shown:
            if not self._read(give_up_s - time.monotonic()):
                raise AssertionError(f"{wanted!r} was not shown, but: {self._shown!r}")
        end = self._shown.index(wanted) + len(wanted)
        shown, self._shown = self._shown[:end], self._shown[end:]
        return shown

    def await_end(self) -> str:
        """Wait for the end of the program; return the output since the last wait."""
        while self._read(GIVE_UP_S):
            pass
        self.process.wait(GIVE_UP_S)
        return self._shown

    def _read(self, timeout_s: float) -> bool:
        """Read more output. Return False at the end or on a timeout."""
        ready, _, _ = select.select([self._screen], [], [], max(0.0, timeout_s))
        try:
            read = os.read(self._screen, 4096) if ready else b""
        except OSError:  # the program closed its end
            return False
        self._shown += read.decode(errors="replace")
        return bool(read)
