"""Checkpoint: the files of a model, whatever their format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.checkpoint.json_fields import JsonFields
from baton.core.pooling import Pooling
from baton.core.sampling import NO_SAMPLING_DEFAULTS, SamplingDefaults

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from baton.checkpoint.quantized import Quantized
    from baton.checkpoint.tokenizer import Tokenizer
    from baton.checkpoint.weight_digests import FileIdentity

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Tokens that end or never are in an answer, and default sampling parameters, of the files."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingDefaults = NO_SAMPLING_DEFAULTS
    is_sampling_assumed: bool = False  # the files recommend none
    suppressed_token_ids: tuple[int, ...] = ()  # never sampled, such as marks of images


@dataclass(frozen=True, slots=True)
class Expected:
    """Shape and allowed dtypes of a tensor."""

    shape: Shape
    dtypes: tuple[str, ...]


class Tensors(Protocol):
    """Tensors of an open checkpoint by name. Errors name the file or the tensor."""

    def names(self) -> list[str]: ...

    def shapes(self) -> dict[str, Shape]: ...

    def check(self, expected: Mapping[str, Expected], is_ignored: Callable[[str], bool]) -> None:
        """Raise ModelError unless there are exactly the expected tensors.

        Shape and dtype must match. Ignored tensors can be present or absent.
        """
        ...

    def tensor(self, name: str) -> Tensor: ...

    def part(self, name: str, index: int) -> Tensor:
        """Return one element of a tensor's first dimension. Reads nothing else."""
        ...

    def copy_into(self, name: str, destination: Tensor) -> None: ...

    def quantized(self, name: str, index: int | None = None) -> Sequence[Quantized] | None:
        """Return a matrix, or one element of a tensor's first dimension, as the file quantizes it.

        Parts follow each other by row, and may have different formats. None: `tensor` and `part`
        return all that is stored.
        """
        ...

    def identities(self) -> Sequence[FileIdentity]:
        """Return the identities of the files when they were opened."""
        ...

    def digest(self) -> str:
        """Hash names, shapes, dtypes and all bytes of all tensors, however files divide them."""
        ...


class Checkpoint(Protocol):
    """Configuration, tokenizer and weights of a model. Methods raise ModelError.

    Nothing is read before a method is called, and only `open_tensors` imports torch.
    """

    @property
    def path(self) -> Path:
        """Return the location of the checkpoint, for messages and other processes."""
        ...

    def read_config(self) -> JsonFields:
        """Return the fields of config.json, under the names of the Hugging Face hub."""
        ...

    def read_generation_defaults(self) -> GenerationDefaults: ...

    def read_pooling(self) -> Pooling | None:
        """Return the pooling of an embedder, or None for other models."""
        ...

    def read_max_text_len(self) -> int | None:
        """Return the tokens of the longest text that an embedder takes, None without a limit."""
        ...

    def read_chat_templates(self) -> Mapping[str, str]:
        """Return the sources of the chat templates by name."""
        ...

    def read_image_processor(self) -> JsonFields | None:
        """Return the fields of transformers' image processor, None without one."""
        ...

    def load_tokenizer(self) -> Tokenizer: ...

    def read_tokenizer_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""
        ...

    def open_tensors(self) -> AbstractContextManager[Tensors]: ...

    def num_weight_bytes(self) -> int: ...
