"""Reads PDFs in a process of its own for each request, which has limits and can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic_core import from_json

from baton.rpc.errors import QueueFull, UnsupportedInput

PROGRAM = Path(__file__).with_name("pdf_program.py")
PACKAGE = "pypdfium2"
ENVIRONMENT = ("LD_LIBRARY_PATH",)  # what the process needs of it; it can hold secrets
PIECE_BYTES = 1 << 18
MAX_BYTES_PER_CHARACTER = 6  # of UTF-8 in JSON, where a control character is an escape
LINE_BYTES = 1 << 10  # around the text of a file
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class PdfLimits:
    """Limits of all files of one request."""

    cpu_s: int = 10
    wall_s: float = 60.0
    memory_bytes: int = 512 << 20
    max_pages: int = 2_000
    max_characters: int = 1 << 22


@dataclass(frozen=True, slots=True)
class PdfText:
    text: str = ""
    has_images: bool = False
    problem: str = ""  # continues the file's name; empty: it has been read


def package_folder() -> str:
    """Return the folder with the package that reads PDFs. Raises UnsupportedInput without it."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise UnsupportedInput(
            f"this router cannot read PDFs, for which it needs the package {PACKAGE}: pip install "
            "'baton[documents]', or send the text"
        )
    return str(Path(package.origin).parents[1])


async def read_pdfs(files: Sequence[bytes], limits: PdfLimits) -> list[PdfText]:
    """Return the texts of the files, up to the first one with a problem.

    The process ends when this returns or is cancelled, or when the router ends. Raises
    UnsupportedInput without the package that reads PDFs, and QueueFull if no process can start.
    """
    process = await _start(_command(limits))
    output, ending = b"", ""
    try:
        async with asyncio.timeout(limits.wall_s):
            await _send(process, files)
            output = await _receive(process, limits, len(files))
            ending = _ending(await process.wait(), limits)
    except TimeoutError:
        ending = f"takes more than {limits.wall_s:g} s to read: send fewer pages"
    finally:
        await _kill(process)
    # On a thread: it can be millions of characters.
    return await asyncio.to_thread(_texts, output, ending, len(files))


async def _start(command: Sequence[str]) -> asyncio.subprocess.Process:
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
            f"the router cannot start a process to read PDFs ({error.strerror}); send this one "
            "later",
            RETRY_AFTER_S,
        ) from error


def _command(limits: PdfLimits) -> list[str]:
    numbers = (limits.cpu_s, limits.memory_bytes, limits.max_pages, limits.max_characters)
    # Isolated (-I, -S): it runs nothing but the program and the package.
    interpreter = (sys.executable, "-I", "-S", str(PROGRAM), package_folder())
    return [*interpreter, str(os.getpid()), *map(str, numbers)]


async def _send(process: asyncio.subprocess.Process, files: Sequence[bytes]) -> None:
    if process.stdin is None:
        return
    sizes = json.dumps([len(data) for data in files]) + "\n"
    with suppress(ConnectionError):  # the process has ended
        for data in (sizes.encode(), *files):
            for start in range(0, len(data), PIECE_BYTES):
                process.stdin.write(data[start : start + PIECE_BYTES])
                await process.stdin.drain()
    process.stdin.close()


async def _receive(process: asyncio.subprocess.Process, limits: PdfLimits, num_files: int) -> bytes:
    """Return the output, cut off at the longest that the limits allow."""
    longest = MAX_BYTES_PER_CHARACTER * limits.max_characters + LINE_BYTES * num_files
    output = bytearray()
    while process.stdout is not None and len(output) <= longest:
        piece = await process.stdout.read(PIECE_BYTES)
        if not piece:
            break
        output += piece
    return bytes(output)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the process, if it has not ended, and wait for its end."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None:
        await process.stdout.read()  # asyncio waits for the end of the pipes, too
    await process.wait()


def _ending(code: int, limits: PdfLimits) -> str:
    """Return the problem of the file that a process was reading when it ended."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {limits.cpu_s} s of CPU time to read: send fewer pages"
    if code >= 0:
        return f"cannot be read: the process that reads it ended with code {code}; send its text"
    return (
        f"takes more than {limits.memory_bytes >> 20} MiB of memory to read, or is damaged: send "
        "fewer pages, or their text"
    )


def _texts(output: bytes, ending: str, num_files: int) -> list[PdfText]:
    # A line without an end is that of a process which was killed.
    lines = output.split(b"\n")[:-1]
    texts = [_text(line) for line in lines[:num_files]]
    return texts if len(texts) == num_files else [*texts, PdfText(problem=ending)]


def _text(line: bytes) -> PdfText:
    """Return what the process has written, which a hostile file may have made it write."""
    try:
        match from_json(line):
            case {"text": str(text), "has_images": bool(has_images)}:
                return PdfText(text, has_images)
            case {"problem": str(problem)}:
                return PdfText(problem=problem)
    except ValueError:
        pass
    return PdfText(problem="cannot be read: send its text")
