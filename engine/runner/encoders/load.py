"""Builds the runner of an encoder from settings: checks and loads the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.exclusions import Feature, check_exclusions
from baton.core.pooling import Pooling
from baton.engine.runner.config import RunnerConfig, check, dtype_name
from baton.engine.runner.encoders.config import ClassifierConfig, EncoderConfig
from baton.engine.runner.encoders.encoder import Encoder, EncodingLayer, UnfusedEncoderLayer
from baton.engine.runner.encoders.encoder_runner import EncoderRunner
from baton.engine.runner.encoders.native_encoder import (
    NativeEncoderOps,
    native_layers,
    with_packed_layers,
)
from baton.engine.runner.encoders.ops import TorchEncoderOps
from baton.engine.runner.encoders.read_config import read_encoder_config
from baton.engine.runner.encoders.weight_loading import load_encoder_weights
from baton.engine.runner.kernels.build import best_variant, cpu_features
from baton.engine.runner.kernels.choose import choose_parts, encoder_kernels
from baton.engine.runner.load import DTYPES, choose_max_model_len
from baton.engine.runner.model.rope import Rope
from baton.engine.runner.model_info import LoadProgressCallback, ModelInfo
from baton.engine.runner.pooling.dense import load_dense
from baton.engine.runner.pooling.pooling_head import choose_pooling
from baton.engine.runner.sampling.logits_processors import versions
from baton.engine.runner.weights.open_weights import open_weights
from baton.engine.spec_decode.config import AUTO


def load_encoder(
    config: RunnerConfig, checkpoint: Checkpoint, on_progress: LoadProgressCallback | None = None
) -> EncoderRunner:
    """Check and load the model.

    Raises ModelError for errors in the model folder and InvalidConfig for errors in the settings.
    """
    model = read_encoder_config(checkpoint)
    _check_settings(config, model)
    dtype, place = DTYPES[dtype_name(config, model)], torch.device(config.device)
    is_int8 = config.activation_dtype == "int8"
    kernels = encoder_kernels(config.kernels, dtype, place)
    # Those kernels take the place of `Parts`, which torch computes in float32.
    name = "torch" if kernels is not None and not is_int8 else config.kernels
    parts = choose_parts(name, dtype, place, activation_dtype=config.activation_dtype)
    pooling = choose_pooling(config.pooling, checkpoint, _classifying(model.classifier))
    defaults = checkpoint.read_generation_defaults()
    max_model_len = choose_max_model_len(config, model.max_text_len)
    with open_weights(config, checkpoint, model, dtype, place, parts, on_progress) as opened:
        weights = load_encoder_weights(model, opened.tensors, opened.target, on_progress)
        fingerprint = opened.fingerprint(str(model), versions(config.logits_processors))
    info = ModelInfo(
        checkpoint=checkpoint,
        fingerprint=fingerprint,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=defaults.eos_token_ids,
        defaults=defaults,
        dtype=dtype_name(config, model),
        max_shareable_prompt_len=None,
        hidden_size=model.hidden_size,
        pooling=pooling,
        can_generate=model.can_generate,
        kernels=parts.name if kernels is None else best_variant(cpu_features()).name,
    )
    dim = model.head_dim
    ropes = [Rope(rope, dim, dim, model.max_text_len, place, dtype) for rope in model.ropes]
    ops = TorchEncoderOps()
    if kernels is None:
        layers: Sequence[EncodingLayer] = [
            UnfusedEncoderLayer(model, index, ops, layer)
            for index, layer in enumerate(weights.layers)
        ]
    else:
        ops, weights = NativeEncoderOps(kernels), with_packed_layers(weights, kernels)
        layers = native_layers(model, weights, kernels)
    encoder = Encoder(model, ops, weights, layers, tuple(ropes))
    return EncoderRunner(info, encoder, load_dense(info))


def _check_settings(config: RunnerConfig, model: EncoderConfig) -> None:
    cause = f"{model.architecture} is an encoder"
    check(config.device == "cpu", f"{cause}: --device must be cpu with it, not {config.device!r}")
    check(not config.enable_prompt_embeds, f"{cause}: it takes no --enable-prompt-embeds")
    check(config.kernels != "triton", f"{cause}: it has no kernels in Triton")
    is_open = config.speculation is None or config.speculation.method == AUTO
    check(is_open, f"{cause}: it generates nothing that could be speculated")
    check_exclusions({Feature.ADAPTERS: config.max_loras, Feature.NO_ADAPTABLE_LAYERS: True})
    check(config.kv_cache_dtype == "auto", f"{cause}: it has no KV cache for --kv-cache-dtype")


def _classifying(classifier: ClassifierConfig | None) -> Pooling | None:
    if classifier is None:
        return None
    return Pooling(
        classifier.pooling,
        normalizes=False,
        num_labels=classifier.num_labels,
        gives_logits=classifier.gives_logits,
    )
