"""Line by which a process announces its address."""

from __future__ import annotations

import io
import sys

import pytest

from baton.rpc.server import announce, parse_announcement


class WrittenPieces(io.StringIO):
    """Output that records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[str] = []

    def write(self, text: str) -> int:
        self.chunks.append(text)
        return len(text)


def test_an_announcement_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    output = WrittenPieces()
    monkeypatch.setattr(sys, "stdout", output)

    announce("decode", "127.0.0.1:50052")

    [line] = output.chunks
    assert line.endswith("\n")
    assert parse_announcement(line) == ("decode", "127.0.0.1:50052")
