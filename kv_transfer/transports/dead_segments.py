"""Removal of shared memory that UCX leaves in /dev/shm when its process is killed.

UCX creates a segment as a file, writes zeros to all of it, and then unlinks it: other processes
find it through /proc. A process that is killed in between, some milliseconds after a node starts
or links to a peer, leaves the file. Nobody can use it any more, but it holds memory until a reboot.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
MIN_AGE_S = 1.0  # a process that has just created a file may not have opened it yet
LOCK_TRIES, LOCK_RETRY_S = 100, 0.01  # bounded: any user may lock the folder for ever
_SEGMENT = re.compile(r"ucx_shm_posix_[0-9a-f]{1,15}")


def remove_dead_segments(folder: Path = SHARED_MEMORY) -> int:
    """Remove the segments of this user that no process has open. Returns their number."""
    num_removed = 0
    with suppress(OSError), _locked(folder), os.scandir(folder) as entries:  # none on other systems
        for entry in entries:
            if _SEGMENT.fullmatch(entry.name):
                with suppress(OSError):  # another process has just removed it
                    num_removed += _remove_if_dead(entry.path)
    return num_removed


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make other nodes wait: a segment that one of them has open would look used."""
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_RETRY_S)
        yield
    finally:
        os.close(folder_fd)


def _remove_if_dead(path: str) -> bool:
    # Without O_NONBLOCK, opening something that is no regular file could wait for ever.
    segment = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(segment)
        is_own = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
        is_dead = is_own and time.time() - facts.st_mtime > MIN_AGE_S and _is_unused(segment)
        if is_dead:
            os.unlink(path)
        return is_dead
    finally:
        os.close(segment)


def _is_unused(segment: int) -> bool:
    """Return whether no other process has the file open or mapped.

    The kernel grants a write lease only then. It knows all processes, also those in other PID
    namespaces, which /proc does not show.
    """
    # Should a process open the file now, the kernel sends a signal: one that is ignored by default.
    fcntl.fcntl(segment, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(segment, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    return True
