"""Loads a vision tower: its weights, and the implementation of its operations."""

from __future__ import annotations

from baton.checkpoint.checkpoint import Tensors
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.vision.config import VisionConfig
from baton.engine.runner.vision.ops import TorchVisionOps
from baton.engine.runner.vision.tower import Tower, VisionTower
from baton.engine.runner.vision.weight_loading import load_tower_weights
from baton.engine.runner.weights.tensor_loading import LoadTarget


def load_tower(
    config: VisionConfig,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
) -> Tower:
    """Check and load the tensors of the tower, and no others.

    `target` is that of the decoder. Raises ModelError if they do not fit the configuration.
    """
    weights = load_tower_weights(config, files, target, on_progress)
    return VisionTower(config, TorchVisionOps(), weights, target.dtype, target.device)
