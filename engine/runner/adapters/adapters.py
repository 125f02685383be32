"""Adapters of a model: those in memory, and the rows of a pass that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.checkpoint.peft_folder import PeftFolder
from baton.engine.runner.adapters.low_rank import Adapter, Group, LowRankProducts
from baton.engine.runner.adapters.place import Part, Place
from baton.engine.runner.adapters.places import AdapterPlaces
from baton.engine.runner.layout import TokenRun
from baton.engine.runner.model.config import ModelConfig


@dataclass(slots=True)
class ActiveAdapters:
    """Adapters of the pass that is being launched. The adapted layers share it."""

    products: LowRankProducts
    groups: Sequence[Group] = ()

    def add(self, place: Place, inputs: Tensor, outputs: Tensor) -> Tensor:
        self.products.add(place, self.groups, inputs, outputs)
        return outputs


class AdapterTable:
    """Adapters in memory, by id. Only the thread that launches passes uses it, but for `load`."""

    def __init__(
        self,
        active: ActiveAdapters,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_rank: int,
        max_loras: int,
    ) -> None:
        self.active = active
        self.max_loras = max_loras
        self._places = AdapterPlaces(config)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._max_rank = max_rank
        self._by_id: dict[str, Adapter] = {}

    def load(self, folder: PeftFolder) -> Adapter:
        """Read an adapter. Any thread can call this. Raises ModelError if it does not fit."""
        parts: dict[Place, list[Part]] = {}
        for place, part in self._places.parts(folder, self._max_rank):
            parts.setdefault(place, []).append(self.active.products.prepare(part, self._like))
        return Adapter(parts)

    def add(self, adapter_id: str, adapter: Adapter) -> None:
        self._by_id[adapter_id] = adapter

    def remove(self, adapter_id: str) -> None:
        self._by_id.pop(adapter_id, None)

    def select(self, runs: Sequence[TokenRun]) -> bool:
        """Activate the adapters of a pass. Returns whether there are any."""
        tokens: dict[str, list[int]] = {}
        first = 0
        for run in runs:
            if run.row.adapter:
                tokens.setdefault(run.row.adapter, []).extend(range(first, first + run.num_tokens))
            first += run.num_tokens
        self.active.groups = [
            Group(self._by_id[adapter_id], torch.tensor(indices).to(self._like.device))
            for adapter_id, indices in tokens.items()
        ]
        return bool(tokens)
