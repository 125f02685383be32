"""Vision tower of a model before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from baton.checkpoint.checkpoint import Checkpoint, Tensors
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.batch.encoding_blocks import EncodingBlocks
from baton.engine.runner.batch.encodings import PictureEncoder
from baton.engine.runner.device.device import Device
from baton.engine.runner.model_info import KvMemory, ModelInfo
from baton.engine.runner.vision.config import VisionConfig
from baton.engine.runner.vision.load import load_tower
from baton.engine.runner.vision.read_config import read_vision_config
from baton.engine.runner.vision.tower import Tower
from baton.engine.runner.vision.tower_runner import TowerRunner
from baton.engine.runner.weights.tensor_loading import LoadTarget


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

    def load(self, files: Tensors, target: LoadTarget) -> Tower | None:
        return load_tower(self.config, files, target)

    def make_runner(
        self,
        info: ModelInfo,
        tower: PictureEncoder,
        stored: EncodingBlocks,
        memory: KvMemory,
        blocks: KvBlocks,
        device: Device,
    ) -> TowerRunner:
        return TowerRunner(info, tower, stored, memory, blocks, device)


def read_vision_tower(checkpoint: Checkpoint) -> UnloadedVisionTower | None:
    config = read_vision_config(checkpoint)
    return None if config is None else UnloadedVisionTower(config)
