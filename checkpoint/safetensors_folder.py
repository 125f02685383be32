"""Folder of config.json, tokenizer files and weights. Imports torch only for tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.checkpoint.checkpoint import GenerationDefaults, Tensors
from baton.checkpoint.json_fields import JsonFields, read_model_text
from baton.checkpoint.model_files import (
    list_weight_files,
    read_chat_templates,
    read_generation_defaults,
)
from baton.checkpoint.pooling_files import read_pooling
from baton.core.pooling import Pooling

if TYPE_CHECKING:
    from baton.checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """Implements `Checkpoint`."""

    path: Path

    def read_config(self) -> JsonFields:
        return JsonFields.read(self.path / "config.json")

    def read_generation_defaults(self) -> GenerationDefaults:
        return read_generation_defaults(self.path)

    def read_pooling(self) -> Pooling | None:
        return read_pooling(self.path)

    def read_max_text_len(self) -> int | None:
        fields = self._read("sentence_bert_config.json")
        if fields is None or not fields.has("max_seq_length"):
            return None
        return fields.positive_int("max_seq_length")

    def read_chat_templates(self) -> dict[str, str]:
        return read_chat_templates(self.path)

    def read_image_processor(self) -> JsonFields | None:
        """Return its own file, or its part of that of the processor."""
        processor = self._read("processor_config.json")
        if processor is not None and processor.has("image_processor"):
            return processor.inner("image_processor")
        return self._read("preprocessor_config.json")

    def load_tokenizer(self) -> Tokenizer:
        from baton.checkpoint.tokenizer_files import load_tokenizer  # nodes do not need jinja

        return load_tokenizer(self.path)

    def read_tokenizer_json(self) -> str:
        return read_model_text(self.path / "tokenizer.json")

    def open_tensors(self) -> AbstractContextManager[Tensors]:
        from baton.checkpoint.weight_files import WeightFiles  # imports torch

        return WeightFiles(self.path)

    def _read(self, name: str) -> JsonFields | None:
        path = self.path / name
        return JsonFields.read(path) if path.exists() else None

    def num_weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in list_weight_files(self.path) if path.is_file())
