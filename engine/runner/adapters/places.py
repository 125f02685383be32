"""Places of an adapter's matrices in a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from baton.checkpoint.peft_folder import LowRank, PeftFolder, Sides, WeightLimits
from baton.core.errors import ModelError
from baton.engine.runner.adapters.targets import (
    DOWN,
    GATE_UP,
    STACKED,
    HeadRows,
    Key,
    Target,
    expert_name,
    find_targets,
)
from baton.engine.runner.model.adapters import ROUTER, Part, Place, PlaceSize
from baton.engine.runner.model.config import ModelConfig

MODULE = re.compile(r"(?P<prefix>(?:.*\.)?)layers\.(?P<layer>\d{1,6})\.(?P<name>[\w.]+)", re.ASCII)
# Prefixes of the text model's layers, in models of text alone and with images.
PREFIXES = (
    *("", "model.", "model.language_model.", "language_model.model.", "language_model."),
    "model.text_model.",
)
HEAD_NAMES = KEY, VALUE = "key", "value"
MAX_NUMBER_BYTES = 8  # float64
MAX_ENTRY_BYTES, MAX_METADATA_BYTES = 512, 1 << 20  # of a tensor, and of all, in a file's header
NESTED = ".base_layer"  # PEFT wraps a module once for each of its parameters


class AdapterPlaces:
    """Finds the places of an adapter's modules in a model."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._targets = find_targets(config)

    def __len__(self) -> int:
        """Return the number of matrices of the files that adapters can change."""
        return len(self._targets)

    def limits(self, max_rank: int) -> WeightLimits:
        """Return the sizes of the largest files that can fit."""
        edges = sum(each.num_rows + each.num_columns for each in self._targets.values())
        max_header_bytes = MAX_METADATA_BYTES + 2 * len(self._targets) * MAX_ENTRY_BYTES
        return WeightLimits(
            max_header_bytes + max_rank * edges * MAX_NUMBER_BYTES,
            max_header_bytes,
            f", which no adapter of this model needs; max_lora_rank is {max_rank}",
        )

    def sizes(self, max_rank: int) -> Mapping[Place, PlaceSize]:
        """Return the largest sizes by place without its number."""
        num_parts: Counter[tuple[Place, int]] = Counter()  # by place and form
        for target in self._targets.values():
            for place, runs in target.pieces:
                num_parts[place, target.form] += len(runs)
            if target.heads is not None:
                layer = target.heads.layer
                num_parts.update((Place(layer, name, 0), target.form) for name in HEAD_NAMES)
        most: Counter[Place] = Counter()
        for (place, _), number in num_parts.items():
            most |= Counter({place._replace(number=None): number})
        return {place: PlaceSize(number, max_rank) for place, number in most.items()}

    def max_bytes(self, rank: int, dtype: torch.dtype, *, merges_routers: bool = True) -> int:
        """Return the memory of an adapter that changes all matrices with this rank."""
        sizes: dict[Place, Counter[int]] = {}  # of the forms of a place
        for target in self._targets.values():
            num_bytes = dtype.itemsize * rank * (target.num_rows + target.num_columns)
            if target.place.name == ROUTER:
                numbers = rank * (target.num_rows + target.num_columns)
                if merges_routers:
                    numbers = target.num_rows * target.num_columns
                num_bytes = torch.float32.itemsize * numbers
            sizes.setdefault(target.place, Counter())[target.form] += num_bytes
        return sum(max(by_form.values()) for by_form in sizes.values())

    def parts(self, folder: PeftFolder, max_rank: int) -> Iterator[tuple[Place, Part]]:
        """Yield the parts of an adapter. Raises ModelError for one that does not fit the model."""
        for key, matrices in self.matrices(folder, max_rank):
            yield from parts_at(self._targets[key], matrices)

    def matrices(self, folder: PeftFolder, max_rank: int) -> Iterator[tuple[Key, LowRank]]:
        """Yield what an adapter changes, as `parts` does."""
        seen, forms = set[int](), dict[Place, int]()
        for module, sides in folder.modules():
            for name, key, matrices in self._matrices(folder, module, sides, max_rank):
                target = self._targets[key]
                self._check(folder, name, target, matrices)
                form = forms.setdefault(target.place, target.form)
                if id(target) in seen or form != target.form:
                    raise ModelError(f"{folder.path} has {name} twice, by different names")
                seen.add(id(target))
                yield key, matrices
        if not seen:
            raise ModelError(f"{folder.path} has no matrices")

    def _matrices(
        self, folder: PeftFolder, module: str, sides: Sides, max_rank: int
    ) -> Iterator[tuple[str, Key, LowRank]]:
        found = MODULE.fullmatch(module)
        if found is not None and found["prefix"] in PREFIXES:
            layer, name = int(found["layer"]), found["name"]
            if (layer, name) in self._targets:
                yield module, (layer, name), folder.low_rank(module, sides, max_rank)
                return
            if name.removesuffix(NESTED) in STACKED and self._config.moe is not None:
                yield from self._stacked(folder, module, layer, sides, max_rank)
                return
        raise self._not_supported(folder, module)

    def _stacked(
        self, folder: PeftFolder, module: str, layer: int, sides: Sides, max_rank: int
    ) -> Iterator[tuple[str, Key, LowRank]]:
        """Yield the matrices of all experts, whose ranks are stacked."""
        assert self._config.moe is not None
        container = module.removesuffix(NESTED)
        targeted = [
            each
            for each in (GATE_UP, DOWN)
            if folder.config.targets_parameter(f"{container}.{each}")
        ]
        # The first parameter is wrapped first.
        if len(targeted) != 2 and (not targeted or module != container):
            raise self._not_supported(folder, module)
        parameter = targeted[0] if module != container else targeted[-1]
        stacked = folder.stacked_low_rank(
            f"{container}.{parameter}", sides, self._config.moe.num_experts, max_rank
        )
        name = container.rpartition(f"layers.{layer}.")[2]
        for expert, matrices in enumerate(stacked):
            key = layer, expert_name(name, parameter, expert)
            if key not in self._targets:
                raise self._not_supported(folder, module)
            yield f"{container}.{parameter}", key, matrices

    def _not_supported(self, folder: PeftFolder, module: str) -> ModelError:
        return ModelError(
            f"{folder.path}: {module} is not a linear layer that adapters can change in "
            f"{self._config.architecture}: projections of attention and recurrent layers, MLPs, "
            "experts and their routers"
        )

    def _check(self, folder: PeftFolder, module: str, target: Target, matrices: LowRank) -> None:
        expected = (target.num_rows, target.num_columns)
        found = (len(matrices.up), matrices.down.shape[1])
        if found != expected:
            raise ModelError(
                f"{folder.path}: {module} changes a matrix of {found[0]} x {found[1]}; that of "
                f"this model is {expected[0]} x {expected[1]}"
            )


def parts_at(target: Target, matrices: LowRank) -> Iterator[tuple[Place, Part]]:
    """Yield the parts of an adapter's matrices at the places of these rows."""
    if target.heads is not None:
        yield from _head_parts(target.heads, matrices)
    for place, runs in target.pieces:
        for first_row, rows in runs:
            yield place, Part(matrices.down, matrices.up[[*rows]].T.contiguous(), first_row)


def _head_parts(heads: HeadRows, matrices: LowRank) -> Iterator[tuple[Place, Part]]:
    for head, rows in enumerate(matrices.up.unflatten(0, (heads.count, -1))):
        key, value = rows[: heads.key_dim], rows[heads.key_dim :]
        # Queries are multiplied by keys that are transposed.
        yield Place(heads.layer, KEY, head), Part(key.T.contiguous(), matrices.down, 0)
        yield Place(heads.layer, VALUE, head), Part(matrices.down, value.T.contiguous(), 0)
