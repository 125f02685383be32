"""Patches for vLLM's servers, applied to stand-ins of the patched modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.engines import PATCHES

RING = """
import os
sched_yield = os.sched_yield
"""
NIXL = """
class nixl_agent_config:
    def __init__(self, enable_prog_thread=True, num_threads=0):
        self.enable_pthread, self.num_threads = enable_prog_thread, num_threads
"""
PROBE = """
import os
os.sched_setaffinity(0, [100_000])
from nixl_cu12._api import nixl_agent_config
config = nixl_agent_config(num_threads=4)
from vllm.distributed.device_communicators import shm_broadcast
print(config.enable_pthread, config.num_threads, shm_broadcast.sched_yield.__name__)
"""


def stand_ins(at: Path) -> None:
    """Write packages with the names of the patched ones."""
    for name, text in (
        ("vllm/distributed/device_communicators/shm_broadcast.py", RING),
        ("nixl_cu12/_api.py", NIXL),
    ):
        (at / name).parent.mkdir(parents=True)
        (at / name).write_text(text)


def test_the_patches_apply_if_their_folder_is_on_the_python_path(tmp_path: Path) -> None:
    stand_ins(tmp_path)
    paths = os.pathsep.join([str(PATCHES), str(tmp_path)])

    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.split() == ["False", "0", "nap"]
