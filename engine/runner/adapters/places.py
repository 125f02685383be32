"""Places of an adapter's matrices in a model: its linear layers, and their rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from baton.checkpoint.peft_folder import LowRank, PeftFolder
from baton.core.errors import ModelError
from baton.engine.runner.adapters.place import Part, Place
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.weights.row_orders import joined_order
from baton.engine.runner.weights.tensor_names import TensorMap

MODULE = re.compile(r"(?P<prefix>(?:.*\.)?)layers\.(?P<layer>\d{1,6})\.(?P<name>[\w.]+)", re.ASCII)
# Prefixes of the text model's layers, in models of text alone and with images.
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")


class Target(NamedTuple):
    """A matrix of the files: its place, its rows there, and its shape."""

    place: Place
    first_row: int
    num_rows: int
    num_columns: int


class AdapterPlaces:
    """Finds the places of an adapter's modules in a model."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        tensors = TensorMap(config)
        self._targets = dict(_targets(tensors))
        order = joined_order(config)
        self._orders: dict[str, Sequence[int] | None] = {"qkv": order}

    def __len__(self) -> int:
        """Return the number of matrices of the files that adapters can change."""
        return len(self._targets)

    def modules(self) -> Iterator[tuple[str, int, int]]:
        """Yield the names of the matrices that adapters can change, their rows and columns."""
        for (layer, name), target in self._targets.items():
            yield f"model.layers.{layer}.{name}", target.num_rows, target.num_columns

    def parts(self, folder: PeftFolder, max_rank: int) -> Iterator[tuple[Place, Part]]:
        """Yield the parts of an adapter. Raises ModelError for one that does not fit the model."""
        num_parts = 0
        for module, matrices in folder.matrices(max_rank):
            target = self._find(folder, module)
            expected = (target.num_rows, target.num_columns)
            found = (len(matrices.up), matrices.down.shape[1])
            if found != expected:
                raise ModelError(
                    f"{folder.path}: {module} changes a matrix of {found[0]} x {found[1]}; that of "
                    f"this model is {expected[0]} x {expected[1]}"
                )
            num_parts += 1
            yield target.place, self._part(target, matrices)
        if not num_parts:
            raise ModelError(f"{folder.path} has no matrices")

    def _find(self, folder: PeftFolder, module: str) -> Target:
        found = MODULE.fullmatch(module)
        if found is not None and found["prefix"] in PREFIXES:
            target = self._targets.get((int(found["layer"]), found["name"]))
            if target is not None:
                return target
        raise ModelError(
            f"{folder.path}: {module} is not a linear layer that adapters can change in "
            f"{self._config.architecture}: projections of attention and of dense MLPs"
        )

    def _part(self, target: Target, matrices: LowRank) -> Part:
        order, first = self._orders.get(target.place.name), target.first_row
        if order is None or first >= len(order):
            return Part(matrices.down, matrices.up.T.contiguous(), first)
        # The rows are stored in another order, in which they can be apart.
        stored = torch.tensor(order)
        rows = ((stored >= first) & (stored < first + target.num_rows)).nonzero().flatten()
        low, end = int(rows[0]), int(rows[-1]) + 1
        up = torch.zeros(matrices.up.shape[1], end - low)
        up[:, rows - low] = matrices.up[stored[rows] - first].T
        return Part(matrices.down, up, low)


def _targets(tensors: TensorMap) -> Iterator[tuple[tuple[int, str], Target]]:
    """Yield the matrices that adapters can change, by layer and name."""
    config, names, shapes = tensors.config, tensors.names, tensors.shapes()
    if config.latent is not None:
        return
    joined = {"qkv": names.qkv, "output": (names.output,)}
    for index, layer in enumerate(config.layers):
        if layer.is_recurrent:
            continue
        dense = {"gate_up": names.gate_up, "down": (names.down,)} if layer.mlp_size else {}
        for kind, parts in {**joined, **dense}.items():
            first = 0
            for name in parts:
                rows, columns = shapes[f"{tensors.in_layer(index, name)}.weight"]
                yield (index, name), Target(Place(index, kind), first, rows, columns)
                first += rows
