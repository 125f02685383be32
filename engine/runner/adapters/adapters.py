"""Adapters of a model: those in memory, and the rows of a pass that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from baton.checkpoint.peft_folder import PeftFolder, WeightLimits
from baton.core.errors import ModelError
from baton.core.exclusions import Feature, check_exclusions
from baton.engine.runner.adapters.adapted_experts import merge_router
from baton.engine.runner.adapters.low_rank import ActiveAdapters
from baton.engine.runner.adapters.places import AdapterPlaces
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.model.adapters import ROUTER, Adapter, Group, Part, Place, Selection
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.pass_layout import TokenRun


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
        num_places: int,
    ) -> None:
        """Raises InvalidConfig if the model has no layers that adapters can change."""
        self.active = active
        self.max_rank = max_rank
        self.max_loras = max_loras
        self.num_places = num_places  # in memory; the callers of `add` keep to it
        self.places = AdapterPlaces(config)
        check_exclusions({Feature.ADAPTERS: True, Feature.NO_ADAPTABLE_LAYERS: not self.places})
        self._num_layers = config.num_layers
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._by_id: dict[str, Adapter] = {}
        self._sizes = self.places.sizes(max_rank)
        self._selected: list[tuple[str, int]] | None = None  # last adapters and tokens, by run
        self._selection: Selection | None = None  # of them
        self._shared: Sequence[Group] | None = None  # its groups, if they share host memory

    @property
    def limits(self) -> WeightLimits:
        """Sizes of the largest files that can fit."""
        return self.places.limits(self.max_rank)

    @property
    def max_bytes(self) -> int:
        """Return the memory of all places, each with the largest adapter that `load` accepts."""
        merges_routers = self.active.products.merges_routers
        return self.num_places * self.places.max_bytes(
            self.max_rank, self._like.dtype, merges_routers=merges_routers
        )

    def load(self, folder: PeftFolder) -> Adapter:
        """Read an adapter. One thread at a time, any. Raises ModelError if it does not fit."""
        parts: dict[Place, list[Part]] = {}
        for place, part in self.places.parts(folder, self.max_rank):
            self.check_range(folder, place, part)
            parts.setdefault(place, []).append(part)
        return self.prepare(parts)

    def prepare(self, parts: dict[Place, list[Part]]) -> Adapter:
        """Return an adapter of these parts. Takes those of routers that are merged."""
        routers = {
            place.layer: merge_router(self.active.routers[place.layer], parts.pop(place))
            for place in [*parts]
            if place.name == ROUTER and self.active.products.merges_routers
        }
        adapter = self.active.products.prepare(parts, self._like, self._num_layers)
        return replace(adapter, routers=routers)

    def check_range(self, folder: PeftFolder, place: Place, part: Part) -> None:
        largest = torch.finfo(self._like.dtype).max
        numbers = torch.stack([edge for side in (part.down, part.up) for edge in side.aminmax()])
        if not (numbers.abs() <= largest).all():
            raise ModelError(
                f"{folder.path}: the matrices of layer {place.layer} ({place.name}) exceed the "
                f"range of {self._like.dtype} when scaled: lower lora_alpha"
            )

    def add(self, adapter_id: str, adapter: Adapter) -> None:
        self._by_id[adapter_id] = adapter
        self.forget_selection()

    def remove(self, adapter_id: str) -> None:
        self._by_id.pop(adapter_id, None)
        self.forget_selection()

    def select(self, runs: Sequence[TokenRun]) -> Selection | None:
        """Return the adapters of a pass, or None if it has none."""
        selected = [(run.row.adapter, run.num_tokens) for run in runs]
        if selected != self._selected:  # as in the steps of the same decodes
            self.forget_selection()
            self._selection = self._select(selected)
            self._selected = selected
        return self._selection

    def put(self, selection: Selection, inputs: StepInputs) -> Sequence[Group]:
        """Put the tokens of the pass that was selected, and return its groups."""
        if inputs is not SHARED_INPUTS:
            return self.active.products.put(selection, inputs)
        if self._shared is None:
            self._shared = self.active.products.put(selection, inputs)
        return self._shared

    def put_decode(self, selection: Selection, inputs: StepInputs) -> Sequence[Group]:
        """Put the tokens of a decode step whose launches a graph can capture."""
        return self.active.products.put(selection, inputs, self._sizes)

    def _select(self, selected: Sequence[tuple[str, int]]) -> Selection | None:
        """Return the adapter of each token, given the adapter and the tokens of each run."""
        ids = [adapter_id for adapter_id, _ in selected]
        used = [adapter_id for adapter_id in dict.fromkeys(ids) if adapter_id]
        if not used:
            return None
        index_by_id = {adapter_id: index for index, adapter_id in enumerate(used)} | {"": -1}
        by_run = np.array([index_by_id[adapter_id] for adapter_id in ids], dtype=np.int64)
        by_token = by_run.repeat([num_tokens for _, num_tokens in selected])
        return Selection([self._by_id[adapter_id] for adapter_id in used], by_token)

    def forget_selection(self) -> None:
        """Forget the last pass, which must not keep adapters in memory."""
        self._selected = self._selection = self._shared = None
        self.active.groups = ()
