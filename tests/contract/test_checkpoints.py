"""A checkpoint that is no folder: its tensors are in memory, under the same configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.checkpoint.checkpoint import Checkpoint, Expected, GenerationDefaults, Shape, Tensors
from baton.checkpoint.json_fields import JsonFields
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.tokenizer import Tokenizer
from baton.checkpoint.weight_digests import FileIdentity
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.choose import TORCH
from baton.engine.runner.weights.decoder_loading import load_decoder
from baton.engine.runner.weights.tensor_loading import LoadTarget
from tests.support.models import VARIANTS, make_model_folder

CPU = torch.device("cpu")


@dataclass
class MemoryTensors:
    by_name: Mapping[str, Tensor]

    def names(self) -> list[str]:
        return sorted(self.by_name)

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self.by_name.items()}

    def check(self, expected: Mapping[str, Expected], is_ignored: Callable[[str], bool]) -> None:
        assert expected.keys() == self.by_name.keys()

    def tensor(self, name: str) -> Tensor:
        return self.by_name[name]

    def part(self, name: str, index: int) -> Tensor:
        return self.by_name[name][index]

    def copy_into(self, name: str, destination: Tensor) -> None:
        destination.copy_(self.by_name[name])

    def quantized(self, name: str, index: int | None = None) -> None:
        return None

    def identities(self) -> list[FileIdentity]:
        return []

    def digest(self) -> str:
        return "in memory"


@dataclass
class MemoryCheckpoint:
    fields: JsonFields
    tensors: MemoryTensors
    path: Path = Path("memory")

    def read_config(self) -> JsonFields:
        return self.fields

    def read_generation_defaults(self) -> GenerationDefaults:
        return GenerationDefaults()

    def read_pooling(self) -> None:
        return None

    def read_max_text_len(self) -> None:
        return None

    def read_image_processor(self) -> None:
        return None

    def read_chat_templates(self) -> dict[str, str]:
        return {}

    def load_tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    def read_tokenizer_json(self) -> str:
        raise NotImplementedError

    @contextmanager
    def open_tensors(self) -> Iterator[Tensors]:
        yield self.tensors

    def num_weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.by_name.values())


def logits_of(checkpoint: Checkpoint) -> Tensor:
    config = read_model_config(checkpoint)
    with checkpoint.open_tensors() as tensors:
        decoder = load_decoder(config, tensors, LoadTarget(torch.float32, CPU, TORCH))
    generator = torch.Generator().manual_seed(1)
    return decoder.logits(torch.randn(3, config.hidden_size, generator=generator))


def test_a_decoder_is_loaded_from_tensors_in_memory(tmp_path: Path) -> None:
    folder = SafetensorsFolder(make_model_folder(tmp_path, VARIANTS["llama"]))
    tensors = MemoryTensors(load_file(tmp_path / "model.safetensors"))
    memory = MemoryCheckpoint(folder.read_config(), tensors)

    assert torch.equal(logits_of(memory), logits_of(folder))
