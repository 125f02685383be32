"""Opens the runner of any model: the only place that tells decoders and encoders apart."""

from __future__ import annotations

import torch

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.hub import open_checkpoint
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.encoders.config import EncoderConfig
from baton.engine.runner.encoders.load import load_encoder
from baton.engine.runner.encoders.read_config import is_encoder, read_encoder_config
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.load import load_runner
from baton.engine.runner.loaded_runner import LoadedRunner
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model_info import LoadProgressCallback


def open_runner(
    config: RunnerConfig, on_progress: LoadProgressCallback | None = None
) -> LoadedRunner:
    """Find, check and load the model.

    Raises ModelError for errors in the model folder and InvalidConfig for errors in the settings.
    Sets the number of torch threads of the whole process if the settings name one.
    """
    checkpoint = open_checkpoint(config.model)
    if not is_encoder(checkpoint):
        return load_runner(config, on_progress)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return load_encoder(config, checkpoint, on_progress)


def read_any_config(checkpoint: Checkpoint) -> ModelConfig | EncoderConfig:
    """Read and check the configuration of a model. Raises ModelError."""
    if is_encoder(checkpoint):
        return read_encoder_config(checkpoint)
    return read_model_config(checkpoint)
