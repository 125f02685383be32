"""Starts, feeds and ends the process that reads the files of one request, within limits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from baton.router.fair_slots import FairSlots
from baton.rpc.errors import QueueFull, UnsupportedInput

PROGRAM = Path(__file__).with_name("program.py")
ENVIRONMENT = ("LD_LIBRARY_PATH",)  # what the process needs of it; it can hold secrets
PIECE_BYTES = 1 << 18
RETRY_AFTER_S = 1.0
NUM_PROCESSES = 2  # of a kind
MAX_WAITING = 64  # requests, each of which holds its files in memory


@dataclass(frozen=True, slots=True)
class FileReader:
    """Module that reads files in a process of its own, and what it needs."""

    path: Path
    package: str
    extra: str  # of Baton, which installs the package
    files: str  # what it reads, for errors
    remedy: str  # what to do instead


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of the process, for all files of one request."""

    cpu_s: int = 10
    wall_s: float = 60.0
    memory_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class ConfinedProcess:
    reader: FileReader
    limits: ProcessLimits
    process: asyncio.subprocess.Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    async def send_files(self, files: Sequence[bytes]) -> None:
        sizes = json.dumps([len(data) for data in files]) + "\n"
        await self.send([sizes.encode(), *files])

    async def send(self, contents: Iterable[bytes]) -> None:
        with suppress(ConnectionError):  # the process has ended
            for data in contents:
                for start in range(0, len(data), PIECE_BYTES):
                    self.stdin.write(data[start : start + PIECE_BYTES])
                    await self.stdin.drain()

    async def receive(self, max_bytes: int) -> bytes:
        """Return the output until its end, or cut off if it is longer."""
        output = bytearray()
        while len(output) <= max_bytes and (piece := await self.stdout.read(PIECE_BYTES)):
            output += piece
        return bytes(output)

    async def problem(self) -> str:
        """Wait for the end, and return the problem of the file that was being read."""
        code, remedy = await self.process.wait(), self.reader.remedy
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"takes more than {self.limits.cpu_s} s of CPU time to read: {remedy}"
        if code >= 0:
            return f"cannot be read: the process that reads it ended with code {code}; {remedy}"
        memory = self.limits.memory_bytes >> 20
        return f"takes more than {memory} MiB of memory to read, or is damaged: {remedy}"

    def problem_of_time(self) -> str:
        return f"takes more than {self.limits.wall_s:g} s to read: {self.reader.remedy}"


def reading_slots(what: str) -> FairSlots:
    """Return slots for the requests of all clients, `what`, whose files are read."""
    return FairSlots(NUM_PROCESSES, MAX_WAITING, max_per_client=NUM_PROCESSES // 2, what=what)


@asynccontextmanager
async def confined_process(
    reader: FileReader, limits: ProcessLimits, numbers: Sequence[int]
) -> AsyncIterator[ConfinedProcess]:
    """Start a process, which ends with the block or with the router. `numbers` are its reader's.

    Raises UnsupportedInput without the package, and QueueFull if no process can start.
    """
    process = await _start(reader, _command(reader, limits, numbers))
    try:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        yield ConfinedProcess(reader, limits, process, process.stdin, process.stdout)
    finally:
        await _kill(process)


def package_folder(reader: FileReader) -> str:
    """Return the folder with the reader's package. Raises UnsupportedInput without it."""
    package = find_spec(reader.package)
    if package is None or package.origin is None:
        raise UnsupportedInput(
            f"this router cannot read {reader.files}, for which it needs the package "
            f"{reader.package}: pip install 'baton[{reader.extra}]'"
        )
    return str(Path(package.origin).parents[1])


def _command(reader: FileReader, limits: ProcessLimits, numbers: Sequence[int]) -> list[str]:
    # Isolated (-I, -S): it runs nothing but the program, the reader and the package.
    program = [sys.executable, "-I", "-S", str(PROGRAM), str(reader.path), package_folder(reader)]
    return [*program, *map(str, (os.getpid(), limits.cpu_s, limits.memory_bytes, *numbers))]


async def _start(reader: FileReader, command: Sequence[str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            process_group=0,  # Ctrl-C in a terminal reaches the router alone
        )
    except OSError as error:
        raise QueueFull(
            f"the router cannot start a process to read {reader.files} ({error.strerror}); send "
            "this one later",
            RETRY_AFTER_S,
        ) from error


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the process, if it has not ended, and wait for its end."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        await process.stdout.read()  # asyncio waits for the end of the pipes, too
    await process.wait()
