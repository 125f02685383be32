"""Folder of a low-rank adapter (LoRA), as PEFT saves it. Imports torch only for tensors."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from baton.checkpoint.json_fields import shorten
from baton.checkpoint.peft_config import CONFIG, PeftAdapterConfig
from baton.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
LENGTH_BYTES = 8  # of the header's length, with which the weights begin
TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight", re.ASCII
)


class Sides(NamedTuple):
    """Tensors of a module, in float32."""

    down: Tensor  # lora_A
    up: Tensor  # lora_B


class LowRank(NamedTuple):
    """Low-rank change of one matrix: up @ down is added to it."""

    down: Tensor  # [rank, columns]
    up: Tensor  # [rows, rank], scaled


class WeightLimits(NamedTuple):
    """Sizes of the weights of adapters of a model, and why they cannot be larger."""

    max_bytes: int = 8 << 30
    max_header_bytes: int = 100_000_000  # as for safetensors
    why: str = ""


ANY_MODEL = WeightLimits()


class PeftFolder:
    """An adapter's files. Raises ModelError, which names file and tensor.

    The weights are read once: `digest` and `modules` see the same bytes, and a file that is cut
    off meanwhile, which would end a process that had mapped it, does no harm.
    """

    def __init__(self, folder: Path, limits: WeightLimits = ANY_MODEL) -> None:
        self.path = folder
        self.config = PeftAdapterConfig.read(folder)
        self._weights = folder / WEIGHTS
        if not self._weights.is_file():
            raise ModelError(
                f"{self._weights} is missing: adapters are read from {WEIGHTS} alone; save this "
                "one with safe_serialization=True"
            )
        self._limits = limits
        self._check_size(self._weights.stat().st_size)

    def digest(self) -> str:
        """Hash the configuration and all bytes of the weights: equal adapters have equal ones."""
        found = hashlib.blake2b(repr(self.config).encode(), digest_size=16)
        found.update(self._bytes)
        return found.hexdigest()

    def modules(self) -> Iterator[tuple[str, Sides]]:
        """Yield each module's name and its tensors."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            found = load(self._bytes)
        except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch lacks
            raise self._unreadable(error) from error
        tensors: dict[str, dict[str, Tensor]] = {}  # by module and side
        for name, tensor in found.items():
            module, side = self._parse(name)
            tensors.setdefault(module, {})[side] = tensor
        for module, own in tensors.items():
            sides = {side: tensor.float() for side, tensor in own.items()}
            yield module, self._sides(module, sides)

    def low_rank(self, module: str, sides: Sides, max_rank: int) -> LowRank:
        """Return the matrices of a linear layer."""
        [found] = self.stacked_low_rank(module, sides, 1, max_rank)
        return found

    def stacked_low_rank(
        self, module: str, sides: Sides, count: int, max_rank: int
    ) -> Sequence[LowRank]:
        """Return the matrices of several layers of the same shape, whose ranks are stacked.

        The rows of `down` are those of one layer after the other. The columns of `up` are the first
        ones of all layers, then the second ones of all, and so on.
        """
        rank = self.config.rank_of(module)
        down, up = sides
        if down.shape[0] != count * rank or up.shape[1] != count * rank:
            of_all = "" if count == 1 else f" for each of {count} experts"
            raise ModelError(
                f"{self._weights}: {module} has the shapes {[*down.shape]} and {[*up.shape]}; "
                f"{CONFIG} says rank {rank}{of_all}"
            )
        if rank > max_rank:
            raise ModelError(
                f"{self._weights}: {module} has rank {rank}; max_lora_rank is {max_rank}"
            )
        up = up * self.config.scale(module, rank)
        ups = up.unflatten(1, (rank, count)).unbind(2)
        return [*map(LowRank, down.chunk(count), ups)]

    @cached_property
    def _bytes(self) -> bytes:
        """Read the weights, up to the limits, since parsing a header stops other threads."""
        try:
            with self._weights.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                self._check_size(num_bytes)
                self._check_header(int.from_bytes(file.peek()[:LENGTH_BYTES], "little"))
                return file.read(num_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def _check_header(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_header_bytes:
            raise ModelError(
                f"{self._weights} cannot be read: its header has {num_bytes} bytes, more than "
                f"{self._limits.max_header_bytes}{self._limits.why}"
            )

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_bytes:
            raise ModelError(
                f"{self._weights} has {num_bytes} bytes, more than "
                f"{self._limits.max_bytes}{self._limits.why}"
            )

    def _unreadable(self, error: Exception) -> ModelError:
        return ModelError(f"{self._weights} cannot be read: {error}")

    def _parse(self, name: str) -> tuple[str, str]:
        found = TENSOR.fullmatch(name)
        if found is None:
            raise ModelError(
                f"{self._weights}: {shorten(repr(name))} is not a low-rank matrix of a linear layer"
            )
        return found["module"], found["side"]

    def _sides(self, module: str, tensors: Mapping[str, Tensor]) -> Sides:
        if set(tensors) != {"A", "B"} or any(
            side.dim() != 2 or not side.numel() for side in tensors.values()
        ):
            raise ModelError(f"{self._weights}: {module} must have lora_A and lora_B, two matrices")
        if not all(edge.isfinite() for side in tensors.values() for edge in side.aminmax()):
            raise ModelError(f"{self._weights}: {module} has numbers that are not finite")
        return Sides(tensors["A"], tensors["B"])
