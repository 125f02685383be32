"""Reader of images in a confined process that continues after damaged ones."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "router" / "pictures" / "picture_program.py"


class Reader:
    def __init__(self, max_pixels: int) -> None:
        spec = spec_from_file_location("picture_program", PROGRAM)
        if spec is None or spec.loader is None:
            raise ImportError(PROGRAM)
        self._program = module_from_spec(spec)
        spec.loader.exec_module(self._program)
        self._reader: Any = self._program.Reader(max_pixels)

    def read(self, files: list[bytes]) -> None:
        """Write a line for each file: its size, or a problem."""
        for data in files:
            self._program.answer(lambda data=data: self._reader.upright(data))
        sys.stdout.buffer.flush()
