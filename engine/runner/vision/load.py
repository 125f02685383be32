"""Loads a vision tower: its weights, and the implementation of its operations."""

from __future__ import annotations

from baton.checkpoint.checkpoint import Tensors
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.vision.config import VisionConfig
from baton.engine.runner.vision.native_ops import NativeVisionOps
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
    ops = target.parts.ops  # native ones compute bfloat16 on the CPU
    vision_ops = NativeVisionOps(ops) if isinstance(ops, NativeOps) else TorchVisionOps()
    return VisionTower(config, vision_ops, weights, target.dtype, target.device)
