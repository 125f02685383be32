"""Open files of this process, by what they refer to."""

from __future__ import annotations

import os
from collections import Counter


def open_files() -> Counter[str]:
    """Count the open files of this process by the file, socket or pipe that each refers to.

    A test of leaks takes two counts, and fails if the second has more of anything. It may have
    less: what other tests have left open can be closed at any time.
    """
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
        except FileNotFoundError:  # the folder itself, or a file that was closed meanwhile
            continue
    return found
