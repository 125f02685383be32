"""Readers of public trace formats."""

from baton.bench.replay.formats.reading import FORMATS, read_trace

__all__ = ["FORMATS", "read_trace"]
