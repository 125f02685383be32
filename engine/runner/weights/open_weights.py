"""Opens the weights of a model, to be loaded for a device and quantized as the settings say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from baton.checkpoint.checkpoint import Checkpoint, Tensors
from baton.engine.runner.config import Architecture, RunnerConfig
from baton.engine.runner.model_info import LoadProgress, LoadProgressCallback
from baton.engine.runner.weights.importance import read_importance
from baton.engine.runner.weights.packing_key import are_cacheable, are_quantized, packing_key
from baton.engine.runner.weights.quantize import QUANTIZE_REVISION
from baton.engine.runner.weights.tensor_loading import LoadTarget, WeightParts
from baton.engine.runner.weights.weight_cache import CachedWeights, WeightCache


@dataclass(frozen=True, slots=True)
class OpenWeights:
    """Files of a model's weights, and what they are loaded for."""

    tensors: Tensors
    target: LoadTarget
    model: Architecture
    quantize: Sequence[str]

    def fingerprint(self, model: str, processor_versions: Sequence[str], tower: str = "") -> str:
        """Return the fingerprint of model and settings. Call it once all weights are loaded.

        `model` describes the model, and `tower` its tower, whether it is loaded or not.
        """
        digest = self.tensors.digest()
        if self.target.cached is not None:
            self.target.cached.digest = digest
        settings = [*self.quantize, QUANTIZE_REVISION]
        parts = [model, settings, digest, processor_versions]
        if tower:
            parts.append(tower)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@contextmanager
def open_weights(
    config: RunnerConfig,
    checkpoint: Checkpoint,
    model: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    parts: WeightParts,
    on_progress: LoadProgressCallback | None,
    part: str = "",
) -> Iterator[OpenWeights]:
    """Yield open weights. `part` names which of them are loaded, if these are not all."""
    with checkpoint.open_tensors() as tensors:
        importance = read_importance(config.quantize_importance, tensors.shapes())
        quantize = [config.quantize, importance.digest, config.activation_dtype]
        cache_key = [*quantize, part] if part else quantize
        with _open_cache(config, model, cache_key, device, parts, tensors, on_progress) as cached:
            target = LoadTarget(dtype, device, parts, config.quantize, cached, importance.columns)
            yield OpenWeights(tensors, target, model, quantize)


@contextmanager
def _open_cache(
    config: RunnerConfig,
    model: Architecture,
    quantize: Sequence[str],
    device: torch.device,
    parts: WeightParts,
    tensors: Tensors,
    on_progress: LoadProgressCallback | None,
) -> Iterator[CachedWeights | None]:
    """Yield the packed weights of an earlier start, or None if none are kept for this model."""
    folder, files = config.weight_cache_dir, tensors.identities()
    # On a CPU, the nodes of a machine share what is in files. A GPU has a copy of its own.
    is_worthwhile = device.type == "cpu" or (
        config.quantize != "none" or model.quantization is not None or are_quantized(files, tensors)
    )
    if folder is None or parts.packer is None or not (is_worthwhile and are_cacheable(files)):
        yield None
        return

    def report(finished: int, whole: int) -> None:
        if on_progress is not None:
            on_progress(LoadProgress(finished, whole))

    cache = WeightCache(folder, config.weight_cache_bytes, torch.get_num_threads())
    key = packing_key(files, str(model), quantize, parts.packer.layout)
    with cache.open(key, tensors.digest, report) as cached:
        yield cached
