"""Process identity that other processes on the same machine can check for liveness.

The kernel lets P access D's memory (CMA) only within one PID namespace of one boot. There, D can
check in /proc whether P is alive. Elsewhere P has no direct access, and no check is needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STATE, _START_TIME = 0, 19  # field indices in /proc/PID/stat after the command name


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    realm: str  # boot id and PID namespace
    pid: int
    start_ticks: str  # distinguishes processes that reuse a pid

    def to_bytes(self) -> bytes:
        return f"{self.realm} {self.pid} {self.start_ticks}".encode()

    @staticmethod
    def from_bytes(encoded: bytes) -> ProcessIdentity:
        """Decode `to_bytes`. Raise ValueError if malformed."""
        realm, pid, start_ticks = encoded.decode().split(" ")
        return ProcessIdentity(realm, int(pid), start_ticks)

    def is_near(self, other: ProcessIdentity) -> bool:
        """Return whether the two processes can access each other's memory."""
        return self.realm == other.realm

    def is_gone(self) -> bool:
        """Return whether this process is dead. Only valid within our own realm."""
        fields = _stat(self.pid)
        if fields is None or fields[_START_TIME] != self.start_ticks:
            return True
        # A zombie may still have running threads; with none left it only waits to be reaped.
        return fields[_STATE] in "ZX" and _num_threads(self.pid) <= 1


def current_process_mark() -> ProcessIdentity:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    namespace = os.readlink("/proc/self/ns/pid")
    fields = _stat(os.getpid())
    start_ticks = fields[_START_TIME] if fields is not None else "unknown"
    return ProcessIdentity(f"{boot_id}/{namespace}", os.getpid(), start_ticks)


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
