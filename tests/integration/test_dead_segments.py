"""A node removes what a killed one left in shared memory. NIXL and UCX are real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from baton.cluster import ClusterOptions, LocalCluster
from baton.kv_transfer.transports.dead_segments import SHARED_MEMORY
from tests.support.waits import await_value

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason=f"this system has no {SHARED_MEMORY}"),
]

# As a node does for each peer that it links to.
LINKS = """
import os
from baton.kv_transfer.transports.nixl import import_nixl
nixl = import_nixl()
while True:
    agent = nixl.nixlAgent(os.urandom(8).hex(), nixl.nixlAgentConfig())
    agent.createBackend("UCX", {})
"""
MAX_KILLS = 20


def segments() -> set[Path]:
    return set(SHARED_MEMORY.glob("ucx_shm_posix_*"))


def kill_while_it_makes_a_segment() -> set[Path]:
    """Kill a process once it has made a segment. Returns what it left."""
    before = segments()
    with subprocess.Popen([sys.executable, "-c", LINKS]) as process:
        await_value(
            lambda: segments() - before or process.poll() is not None,
            turn=lambda: None,  # UCX unlinks a segment some milliseconds after it has made it
        )
        process.kill()
    return segments() - before


def test_a_node_removes_shared_memory_segments_of_a_killed_process(
    cluster_options: Callable[..., ClusterOptions],
) -> None:
    left: set[Path] = set()
    for _ in range(MAX_KILLS):
        left = left or kill_while_it_makes_a_segment()
    assert left
    for path in left:
        with suppress(FileNotFoundError):  # made, and unlinked, by another process
            os.utime(path, (0, 0))  # as after a while

    with LocalCluster(cluster_options()):
        assert not left & segments()
