"""Vision tower of a model before its weights are loaded, and their loading."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from baton.checkpoint.checkpoint import Checkpoint, Tensors
from baton.engine.runner.kernels.choose import Parts
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.vision.config import VisionConfig
from baton.engine.runner.vision.native_ops import NativeVisionOps
from baton.engine.runner.vision.ops import TorchVisionOps
from baton.engine.runner.vision.read_config import read_vision_config
from baton.engine.runner.vision.tensor_names import TowerTensors
from baton.engine.runner.vision.tower import VisionTower
from baton.engine.runner.vision.weight_loading import load_tower_weights
from baton.engine.runner.weights.tensor_loading import LoadTarget

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnloadedVisionTower:
    """Implements `UnloadedTower`."""

    config: VisionConfig

    @property
    def settings(self) -> str:
        return str(self.config)

    @property
    def encoding_size(self) -> int:
        return self.config.encoding_size

    def num_rows(self, height: int, width: int) -> int:
        return self.config.num_tokens(height, width)

    def load(self, files: Tensors, target: LoadTarget) -> VisionTower | None:
        return load_tower(self.config, files, target)


def read_vision_tower(checkpoint: Checkpoint) -> UnloadedVisionTower | None:
    config = read_vision_config(checkpoint)
    return None if config is None else UnloadedVisionTower(config)


def load_tower(
    config: VisionConfig,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
) -> VisionTower | None:
    """Check and load the tensors of the tower, and no others; None if the files have none of it.

    `target` is that of the decoder. Raises ModelError if they do not fit the configuration.
    """
    tensors = TowerTensors(config, files.shapes())
    if all(map(tensors.is_ignored, files.names())):
        log.warning("the files have no vision tower: text is served, pictures are not encoded")
        return None
    parts = target.parts
    if isinstance(parts, Parts) and parts.tower_ops is not None:
        target = replace(target, parts=replace(parts, ops=parts.tower_ops))
    weights = load_tower_weights(tensors, files, target, on_progress)
    ops = target.parts.ops  # native ones compute bfloat16 on the CPU
    vision_ops = NativeVisionOps(ops) if isinstance(ops, NativeOps) else TorchVisionOps()
    return VisionTower(config, vision_ops, weights, target.dtype, target.device)
