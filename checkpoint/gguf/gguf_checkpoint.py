"""GGUF file: configuration, tokenizer and weights in one. Imports torch only for tensors.

A vision tower is in another file next to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from baton.checkpoint.checkpoint import GenerationDefaults, Tensors
from baton.checkpoint.gguf.architectures import read_config, read_tensors
from baton.checkpoint.gguf.generation import (
    read_chat_templates,
    read_generation_defaults,
    read_pooling,
)
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.json_fields import JsonFields
from baton.core.pooling import Pooling

if TYPE_CHECKING:
    from baton.checkpoint.gguf.projector import GgufProjector
    from baton.checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True)
class GgufCheckpoint:
    """Implements `Checkpoint`."""

    path: Path
    mmproj: Path | None = None  # of the vision tower; None: one next to it, if there is one

    @classmethod
    def open(cls, path: Path, mmproj: str) -> GgufCheckpoint:
        """Return the checkpoint of a file. Raises ModelError if the tower named does not fit."""
        checkpoint = cls(path, Path(mmproj).expanduser() if mmproj else None)
        if mmproj:
            checkpoint.read_config()
        return checkpoint

    def read_config(self) -> JsonFields:
        config = read_config(self._file)
        return config if self._projector is None else self._projector.add_to(config)

    def read_generation_defaults(self) -> GenerationDefaults:
        return read_generation_defaults(self._file)

    def read_pooling(self) -> Pooling | None:
        return read_pooling(self._file)

    def read_max_text_len(self) -> None:
        """Return that GGUF has no such limit."""
        return

    def read_chat_templates(self) -> dict[str, str]:
        return read_chat_templates(self._file)

    def read_image_processor(self) -> JsonFields | None:
        return None if self._projector is None else self._projector.read_image_processor()

    def load_tokenizer(self) -> Tokenizer:
        from baton.checkpoint.gguf.gguf_tokenizer import load_tokenizer  # nodes do not need jinja

        return load_tokenizer(self._file)

    def read_tokenizer_json(self) -> str:
        from baton.checkpoint.gguf.gguf_tokenizer import tokenizer_json

        return tokenizer_json(self._file)

    def open_tensors(self) -> AbstractContextManager[Tensors]:
        from baton.checkpoint.gguf.gguf_tensors import GgufTensors  # imports torch

        file, tensors = self._file, read_tensors(self._file)
        if self._projector is not None:
            file, tensors = (
                file.with_file(self._projector.file),
                {**tensors, **self._projector.tensors()},
            )
        return GgufTensors(file, tensors)

    def num_weight_bytes(self) -> int:
        return self._file.num_bytes + (self._projector.file.num_bytes if self._projector else 0)

    @cached_property
    def _projector(self) -> GgufProjector | None:
        from baton.checkpoint.gguf.projector import GgufProjector, find_projector  # of GGUF alone

        if self.mmproj is None:
            return find_projector(self._file)
        return GgufProjector.of(GgufFile.open(self.mmproj), self._file)

    @cached_property
    def _file(self) -> GgufFile:
        return GgufFile.open(self.path)
