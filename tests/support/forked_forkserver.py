"""Server of `multiprocessing` that is forked, which saves it the import of torch."""

from __future__ import annotations

import multiprocessing.util
import os
import sys
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

import pytest

from tests.support.fork_server import NUM_STREAMS, SERVERS

FORKSERVER = "tests.support.forked_forkserver"
ENDPOINTS = "tests.support.preloaded_endpoints"


def fork_context() -> ForkServerContext:
    """Return a multiprocessing context whose server has imported what its processes need."""
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", _fork_server)
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def _fork_server(_path: object, _arguments: object, fds: list[int]) -> int:
    command = [sys.executable, "-m", FORKSERVER]
    return SERVERS.fork(command, dict(os.environ), [*range(NUM_STREAMS), *fds])


def main() -> None:
    """Serve with the descriptors that the command line names."""
    import_module(ENDPOINTS)
    listener, alive = map(int, sys.argv[1:])
    forkserver.main(listener, alive, preload=())
