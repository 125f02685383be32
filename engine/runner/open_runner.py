"""Opens the runner of any model: the only place that tells kinds of models apart.

torch is imported when a model is loaded: `baton up` reads configurations alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.hub import open_checkpoint
from baton.engine.runner.config import Architecture, RunnerConfig, check
from baton.engine.runner.encoders.encoder_models import EncoderModels
from baton.engine.runner.families.read_config import knows_architecture, read_model_config
from baton.engine.runner.model_info import LoadProgressCallback

if TYPE_CHECKING:
    from baton.engine.runner.loaded_runner import LoadedRunner
    from baton.engine.runner.model.config import ModelConfig


class ModelKind(Protocol):
    """Kind of models with a runner of its own. All methods raise ModelError."""

    def has(self, checkpoint: Checkpoint) -> bool:
        """Return whether the model is of this kind."""
        ...

    def read_config(self, checkpoint: Checkpoint) -> Architecture: ...

    def load(
        self,
        config: RunnerConfig,
        checkpoint: Checkpoint,
        on_progress: LoadProgressCallback | None = None,
    ) -> LoadedRunner: ...

    def check_weights(self, checkpoint: Checkpoint) -> str:
        """Check names and shapes of the weights, and describe the model in a line."""
        ...

    def read_cached_layers(self, checkpoint: Checkpoint) -> ModelConfig | None:
        """Return the model as the KV cache has its layers; None: it keeps nothing."""
        ...


Load = Callable[[RunnerConfig, LoadProgressCallback | None], "LoadedRunner"]


def _transformers_models() -> ModelKind:
    # Imported late, as transformers is with it.
    from baton.engine.runner.transformers_models.model_kind import TransformersModels

    return TransformersModels()


def _in_ranks() -> Load:
    from baton.engine.runner.ranks.leading import load_in_ranks

    return load_in_ranks


KINDS: tuple[ModelKind, ...] = (EncoderModels(),)  # all other models are decoders
FALLBACKS: tuple[Callable[[], ModelKind], ...] = (_transformers_models,)  # of unknown decoders
DIVIDED: tuple[Callable[[], Load], ...] = (_in_ranks,)  # decoders among several processes


def kind_of(checkpoint: Checkpoint) -> ModelKind | None:
    """Return the kind of a model; None: a decoder of a known family.

    Raises ModelError without a config.json.
    """
    kind = next((kind for kind in KINDS if kind.has(checkpoint)), None)
    if kind is not None or knows_architecture(checkpoint.read_config()):
        return kind
    fallbacks = (make() for make in FALLBACKS)
    return next((kind for kind in fallbacks if kind.has(checkpoint)), None)


def open_runner(
    config: RunnerConfig, on_progress: LoadProgressCallback | None = None
) -> LoadedRunner:
    """Find, check and load the model.

    Raises ModelError for errors in the model folder and InvalidConfig for errors in the settings.
    Sets the number of torch threads of the whole process if the settings name one.
    """
    import torch

    from baton.engine.runner.load import load_runner, load_tower_runner

    checkpoint = open_checkpoint(config.model, mmproj=config.mmproj)
    kind = kind_of(checkpoint)
    for divided in DIVIDED if config.tensor_parallel_size > 1 else ():
        check(kind is None, f"--tensor-parallel-size: {config.model} is not a decoder of Baton's")
        check(config.loads_decoder, "--tensor-parallel-size: not for encode nodes")
        return divided()(config, on_progress)
    if kind is None:
        load = load_runner if config.loads_decoder else load_tower_runner
        return load(config, on_progress)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return kind.load(config, checkpoint, on_progress)


def read_cached_layers(checkpoint: Checkpoint) -> ModelConfig | None:
    """Return a model as the KV cache has its layers; None: it keeps nothing. Raises ModelError."""
    kind = kind_of(checkpoint)
    return read_model_config(checkpoint) if kind is None else kind.read_cached_layers(checkpoint)


def read_any_config(checkpoint: Checkpoint) -> Architecture:
    """Read and check the configuration of a model. Raises ModelError."""
    kind = kind_of(checkpoint)
    return read_model_config(checkpoint) if kind is None else kind.read_config(checkpoint)
