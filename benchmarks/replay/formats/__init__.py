"""Readers of public trace formats, and the detection of the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.replay.formats.azure import COLUMNS, read_azure
from benchmarks.replay.formats.mooncake import read_mooncake
from benchmarks.replay.formats.source import InvalidTrace, TextFile, read_files
from benchmarks.replay.formats.weka import read_weka
from benchmarks.replay.trace import ReplayTrace

FORMATS: Mapping[str, Callable[[Sequence[TextFile]], ReplayTrace]] = {
    "mooncake": read_mooncake,
    "weka": read_weka,
    "azure": read_azure,
}


def read_trace(path: Path, format_name: str = "") -> ReplayTrace:
    """Read a trace; without a name, the format is detected. Raises InvalidTrace."""
    files = read_files(path)
    name = format_name or _detect(path, files)
    if name not in FORMATS:
        raise InvalidTrace(f"--format {name}: choose one of {', '.join(FORMATS)}")
    trace = FORMATS[name](files)
    if not trace.requests:
        raise InvalidTrace(f"{path} has no requests")
    return trace


def _detect(path: Path, files: Sequence[TextFile]) -> str:
    """Return the format by the first names in the trace."""
    head = next(line for file in files for _, line in file.lines())
    text = next(file.text for file in files if file.text.strip())
    if head.startswith(COLUMNS[0]):
        return "azure"
    if '"input_length"' in head:
        return "mooncake"
    if '"requests"' in text:
        return "weka"
    raise InvalidTrace(f"{path} has no known format; name it with --format {'|'.join(FORMATS)}")
