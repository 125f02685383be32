"""Models that Baton does not know, on transformers' modules: a kind of model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.checkpoint.checkpoint import Checkpoint
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.transformers_models.outline import (
    ModelOutline,
    find_architecture,
    read_outline,
)

if TYPE_CHECKING:
    from baton.engine.runner.model.config import ModelConfig
    from baton.engine.runner.model_runner import TorchRunner
    from baton.engine.runner.transformers_models.config import InspectedModel


class TransformersModels:
    """Implements `ModelKind` for architectures that no other kind has.

    transformers is imported when a model is loaded or its weights are checked.
    """

    def has(self, checkpoint: Checkpoint) -> bool:
        return find_architecture(checkpoint) is not None

    def read_config(self, checkpoint: Checkpoint) -> ModelOutline:
        """Read config.json alone: what the modules keep is found out later."""
        return read_outline(checkpoint)

    def load(
        self,
        config: RunnerConfig,
        checkpoint: Checkpoint,
        on_progress: LoadProgressCallback | None = None,
    ) -> TorchRunner:
        outline = read_outline(checkpoint)
        from baton.engine.runner.transformers_models.load import load_transformers_runner

        return load_transformers_runner(config, outline, on_progress)

    def read_cached_layers(self, checkpoint: Checkpoint) -> ModelConfig:
        return self._inspect(checkpoint).config

    def check_weights(self, checkpoint: Checkpoint) -> str:
        found = self._inspect(checkpoint)
        with checkpoint.open_tensors():
            pass  # all files are there, and can be opened
        return (
            f"{found.config.architecture}, {found.num_parameters:,} parameters in "
            f"{found.config.dtype}; "
            "runs on transformers' modules with Baton's KV cache and attention, which is slower "
            "than an architecture that Baton knows"
        )

    def _inspect(self, checkpoint: Checkpoint) -> InspectedModel:
        outline = read_outline(checkpoint)
        from baton.engine.runner.transformers_models.config import inspect_model

        return inspect_model(outline)
