"""Embeddings that clients send in place of tokens (`--enable-prompt-embeds`).

They take the way of pictures: a run of rows is a picture of the tower below, which computes
nothing, and its placeholder tokens take the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Tensors
from baton.core.errors import InvalidConfig
from baton.core.media import Picture
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.batch.encodings import EncodingBlocks, LayerDone, PictureEncoder
from baton.engine.runner.config import check
from baton.engine.runner.device.device import Device
from baton.engine.runner.loaded_runner import CachingRunner
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model_info import KvMemory, ModelInfo
from baton.engine.runner.weights.tensor_loading import LoadTarget

OPTION = "--enable-prompt-embeds"


@dataclass(frozen=True, slots=True)
class PromptEmbedsTower:
    """Implements `UnloadedTower` and `PictureEncoder`."""

    encoding_size: int
    target: LoadTarget | None = None  # None: not loaded
    settings: str = ""  # encodings depend on none

    def num_rows(self, height: int, width: int) -> int:
        if width != self.encoding_size:
            raise ValueError(
                f"embeddings of {width} numbers; this model's have {self.encoding_size}"
            )
        return height

    def load(self, files: Tensors, target: LoadTarget) -> PictureEncoder:
        return PromptEmbedsTower(self.encoding_size, target)

    def encode(
        self, pictures: Sequence[Picture], layer_done: LayerDone | None = None
    ) -> list[Tensor]:
        return [self._rows(each) for each in pictures]

    def _rows(self, given: Picture) -> Tensor:
        assert self.target is not None
        numbers = torch.frombuffer(bytearray(given.rgb), dtype=getattr(torch, given.dtype))
        rows = numbers.view(given.height, given.width)
        return rows.to(self.target.device, self.target.dtype)

    def make_runner(
        self,
        info: ModelInfo,
        tower: PictureEncoder,
        stored: EncodingBlocks,
        memory: KvMemory,
        blocks: KvBlocks,
        device: Device,
    ) -> CachingRunner:
        raise InvalidConfig(f"{OPTION} is for nodes that compute prompts, not for encode nodes")


def prompt_embeds_tower(model: ModelConfig, *, has_tower: bool) -> PromptEmbedsTower:
    """Raises InvalidConfig for models whose layers take more than an embedding of each token."""
    check(not has_tower, f"{OPTION} cannot be used yet with a model that takes images")
    is_plain = model.per_layer is None and not model.has_grid_positions
    check(
        is_plain,
        f"{OPTION} cannot be used with {model.architecture}: its layers or positions "
        "depend on token ids",
    )
    return PromptEmbedsTower(model.hidden_size)
