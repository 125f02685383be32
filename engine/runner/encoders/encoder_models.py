"""Encoders as a kind of model: what recognises, checks and loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.checkpoint.checkpoint import Checkpoint
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.encoders.config import EncoderConfig
from baton.engine.runner.encoders.read_config import is_encoder, read_encoder_config
from baton.engine.runner.model_info import LoadProgressCallback

if TYPE_CHECKING:
    from baton.engine.runner.encoders.encoder_runner import EncoderRunner


class EncoderModels:
    """Implements `ModelKind`."""

    def has(self, checkpoint: Checkpoint) -> bool:
        return is_encoder(checkpoint)

    def read_config(self, checkpoint: Checkpoint) -> EncoderConfig:
        return read_encoder_config(checkpoint)

    def load(
        self,
        config: RunnerConfig,
        checkpoint: Checkpoint,
        on_progress: LoadProgressCallback | None = None,
    ) -> EncoderRunner:
        from baton.engine.runner.encoders.load import load_encoder

        return load_encoder(config, checkpoint, on_progress)

    def read_cached_layers(self, checkpoint: Checkpoint) -> None:
        """Return nothing: texts are computed whole."""

    def check_weights(self, checkpoint: Checkpoint) -> str:
        from baton.engine.runner.encoders.weight_loading import (
            EncoderTensors,
            check_encoder_tensors,
        )

        config = read_encoder_config(checkpoint)
        with checkpoint.open_tensors() as files:
            tensors = EncoderTensors(config, files.shapes())
            num_parameters = check_encoder_tensors(tensors, files).num_loaded
        found = f"{config.architecture}, {num_parameters:,} parameters in {config.dtype}"
        return f"{found}; embeds or scores texts of up to {config.max_text_len} tokens"
