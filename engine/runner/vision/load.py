"""Loads a vision tower: its weights, and the implementation of its operations."""

from __future__ import annotations

import logging

from baton.checkpoint.checkpoint import Tensors
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.vision.config import VisionConfig
from baton.engine.runner.vision.native_ops import NativeVisionOps
from baton.engine.runner.vision.ops import TorchVisionOps
from baton.engine.runner.vision.tensor_names import TowerTensors
from baton.engine.runner.vision.tower import Tower, VisionTower
from baton.engine.runner.vision.weight_loading import load_tower_weights
from baton.engine.runner.weights.tensor_loading import LoadTarget

log = logging.getLogger(__name__)


def load_tower(
    config: VisionConfig,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
) -> Tower | None:
    """Check and load the tensors of the tower, and no others; None if the files have none of it.

    `target` is that of the decoder. Raises ModelError if they do not fit the configuration.
    """
    tensors = TowerTensors(config, files.shapes())
    if all(map(tensors.is_ignored, files.names())):
        log.warning("the files have no vision tower: text is served, pictures are not encoded")
        return None
    weights = load_tower_weights(tensors, files, target, on_progress)
    ops = target.parts.ops  # native ones compute bfloat16 on the CPU
    vision_ops = NativeVisionOps(ops) if isinstance(ops, NativeOps) else TorchVisionOps()
    return VisionTower(config, vision_ops, weights, target.dtype, target.device)
