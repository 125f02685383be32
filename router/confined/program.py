"""Program of a confined process: files come on stdin, and what a reader finds goes to stdout.

The files are hostile. The process has limits of CPU time and memory, cannot open files or
connections, and ends with its parent. It imports nothing of Baton, so that it starts quickly.

A reader is a module with a class `Reader`: it imports what it needs when it is created, and
`read(files)` writes to stdout. stdin: the sizes of the files as a line of JSON, then the files.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, BinaryIO

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NICENESS = 10  # the router's other requests come first


def confine(parent_pid: int, cpu_s: int, memory_bytes: int) -> None:
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if os.getppid() != parent_pid:  # the parent ended before the prctl call
        sys.exit(1)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU, then SIGKILL


def load_reader(path: str, numbers: list[int]) -> Any:
    spec = spec_from_file_location("reader", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python module")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Reader(*numbers)


def receive_files(stream: BinaryIO) -> list[bytes]:
    return [stream.read(size) for size in json.loads(stream.readline())]


def main(reader_path: str, packages: str, limits: list[str]) -> None:
    """`packages` is the folder with those that the reader imports."""
    parent_pid, cpu_s, memory_bytes, *numbers = map(int, limits)
    confine(parent_pid, cpu_s, memory_bytes)
    sys.path.append(packages)
    reader = load_reader(reader_path, numbers)
    files = receive_files(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    reader.read(files)
    sys.stdout.buffer.flush()
    os._exit(0)  # nothing of the files is worth a clean end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
