"""Folder of a low-rank adapter (LoRA), as PEFT saves it. Imports torch only for tensors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from baton.checkpoint.json_fields import JsonFields, shorten
from baton.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_BYTES = 8 << 30
# Settings that change the weights or the computation, and the values that Baton supports.
SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None,),
}
# They initialise the adapter by changing the base model, which must then be saved with it.
CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight", re.ASCII
)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales of an adapter's matrices."""

    rank: int
    alpha: float
    uses_rank_root: bool  # rsLoRA: alpha is divided by the root of the rank
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    target_parameters: Sequence[str] = ()

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Raises ModelError for what is not supported."""
        fields = JsonFields.read(folder / CONFIG)
        for name, values in SUPPORTED.items():
            if fields.get(name) not in values:
                expected = " or ".join(map(repr, values))
                raise fields.wrong(name, f"must be {expected}: other adapters are not supported")
        how = fields.get("init_lora_weights")
        if isinstance(how, str) and how.lower().startswith(CHANGES_BASE):
            raise fields.wrong(
                "init_lora_weights", "must leave the base model as it is: convert the adapter"
            )
        return cls(
            rank=fields.positive_int("r"),
            alpha=fields.number("lora_alpha", 8),
            uses_rank_root=fields.flag("use_rslora", False),
            rank_pattern=_pattern(fields, "rank_pattern"),
            alpha_pattern=_pattern(fields, "alpha_pattern"),
            target_parameters=_names(fields, "target_parameters"),
        )

    def targets_parameter(self, name: str) -> bool:
        """Return whether a parameter is changed that is no weight of a linear layer."""
        return any(name == each or name.endswith(f".{each}") for each in self.target_parameters)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's product."""
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (rank**0.5 if self.uses_rank_root else rank)

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))


def _pattern(fields: JsonFields, name: str) -> Mapping[str, float]:
    found = fields.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(
        type(number) in (int, float) and number > 0 for number in found.values()
    ):
        raise fields.wrong(name, "must map modules to positive numbers")
    return {str(module): number for module, number in found.items()}


def _names(fields: JsonFields, name: str) -> Sequence[str]:
    found = fields.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise fields.wrong(name, "must be a list of names")
    return tuple(found)


def _matching(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the number of the first pattern, a regular expression, that a module ends with."""
    for key, number in pattern.items():
        if module == key or module.endswith(f".{key}") or _matches(key, module):
            return number
    return default


def _matches(key: str, module: str) -> bool:
    try:
        return re.fullmatch(rf"(.*\.)?({key})", module) is not None
    except re.error:
        return False


class Sides(NamedTuple):
    """Tensors of a module, in float32."""

    down: Tensor  # lora_A
    up: Tensor  # lora_B


class LowRank(NamedTuple):
    """Low-rank change of one matrix: up @ down is added to it."""

    down: Tensor  # [rank, columns]
    up: Tensor  # [rows, rank], scaled


class PeftFolder:
    """An adapter's files. Raises ModelError, which names file and tensor.

    The weights are read once: `digest` and `modules` see the same bytes, and a file that is cut
    off meanwhile, which would end a process that had mapped it, does no harm.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = AdapterConfig.read(folder)
        self._weights = folder / WEIGHTS
        if not self._weights.is_file():
            raise ModelError(
                f"{self._weights} is missing: adapters are read from {WEIGHTS} alone; save this "
                "one with safe_serialization=True"
            )
        if self._weights.stat().st_size > MAX_BYTES:
            raise ModelError(f"{self._weights} has more than {MAX_BYTES >> 30} GiB")

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
        try:
            return self._weights.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from error

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
