"""Products of adapters, and their torch reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.model.adapters import Adapter, Group, Part, Place, PlaceSize, Selection
from baton.engine.runner.model.linear import ExpertChoice, Moe, Router
from baton.engine.runner.model.ops import MlpGate, Ops


def convert_parts(
    parts: Mapping[Place, Sequence[Part]], like: Tensor
) -> Mapping[Place, Sequence[Part]]:
    """Return the parts with the dtype and the device of `like`. Each matrix is converted once."""
    converted: dict[int, Tensor] = {}

    def convert(matrix: Tensor) -> Tensor:
        if id(matrix) not in converted:
            converted[id(matrix)] = matrix.to(like).contiguous()
        return converted[id(matrix)]

    return {
        place: [Part(convert(each.down), convert(each.up), each.first_row) for each in its]
        for place, its in parts.items()
    }


class ExpertPass(NamedTuple):
    """Arguments of a mixture of experts."""

    ops: Ops
    moe: Moe
    layer: int
    gate: MlpGate
    inputs: Tensor
    routing: ExpertChoice


class LowRankProducts:
    """Adds the products of adapters to the outputs of linear layers.

    This base, from which others are derived, does so in torch in the dtype of the model: adapter by
    adapter, and heads and experts one by one.
    """

    merges_routers = True  # an adapter's router is a matrix of its own, rather than a product
    has_static_launches = False  # `put` with sizes makes launches that a graph can capture

    def put(
        self,
        selection: Selection,
        inputs: StepInputs,
        sizes: Mapping[Place, PlaceSize] | None = None,
    ) -> Sequence[Group]:
        """Put the tokens of a pass, and return its groups.

        With the largest sizes of adapters by place, launches depend on these and on the number of
        tokens only, if they can be static. Places have no numbers.
        """
        return [
            Group(adapter, inputs.put(np.flatnonzero(selection.indices == index)))
            for index, adapter in enumerate(selection.adapters)
        ]

    def prepare(
        self, parts: Mapping[Place, Sequence[Part]], like: Tensor, num_layers: int
    ) -> Adapter:
        """Return an adapter as `add` needs it, of a model that computes in the dtype of `like`."""
        return Adapter(convert_parts(parts, like))

    def add(self, place: Place, groups: Sequence[Group], inputs: Tensor, outputs: Tensor) -> None:
        """Add to the outputs of each group's tokens what its adapter has for this place."""
        for adapter, tokens in groups:
            for part in adapter.parts.get(place, ()):
                added = inputs[tokens] @ part.down.T @ part.up
                end = part.first_row + part.up.shape[1]
                outputs[tokens, part.first_row : end] += added

    def add_to_heads(
        self, layer: int, name: str, groups: Sequence[Group], inputs: Tensor, outputs: Tensor
    ) -> Tensor:
        """Return [tokens, heads, rows] with the products of the places of all heads."""
        for head in range(inputs.shape[1]):
            own = outputs[:, head].contiguous()
            self.add(Place(layer, name, head), groups, inputs[:, head].contiguous(), own)
            outputs[:, head] = own
        return outputs

    def route(
        self, ops: Ops, router: Router, layer: int, inputs: Tensor, groups: Sequence[Group]
    ) -> ExpertChoice | None:
        """Return the experts of each token. None: routers are merged, and `Ops` routes."""
        return None

    def mix_experts(self, pass_: ExpertPass, groups: Sequence[Group]) -> Tensor | None:
        """Return the output of experts with adapters. None: these products do not compute it."""
        return None


TORCH_LOW_RANK = LowRankProducts()


@dataclass(slots=True)
class ActiveAdapters:
    """Adapters of the layer that is being computed. The adapted layers share it."""

    products: LowRankProducts
    groups: Sequence[Group] = ()
    routers: dict[int, Router] = field(default_factory=dict)  # of the model, by layer

    def add(self, place: Place, inputs: Tensor, outputs: Tensor) -> Tensor:
        self.products.add(place, self.groups, inputs, outputs)
        return outputs
