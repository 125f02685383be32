"""Builds the runner of an encoder from settings: checks and loads the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.checkpoint.checkpoint import Checkpoint, Tensors
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
from baton.engine.runner.encoders.ops import (
    ClassifierWeights,
    EmbeddingTables,
    EncoderLayer,
    EncoderWeights,
    TorchEncoderOps,
)
from baton.engine.runner.encoders.read_config import read_encoder_config
from baton.engine.runner.encoders.tensor_names import EncoderTensors, check_encoder_tensors
from baton.engine.runner.kernels.build import best_variant, cpu_features
from baton.engine.runner.kernels.choose import choose_parts, encoder_kernels
from baton.engine.runner.load import DTYPES, choose_max_model_len
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.rope import Rope
from baton.engine.runner.model_info import LoadProgressCallback, ModelInfo
from baton.engine.runner.pooling.dense import load_dense
from baton.engine.runner.pooling.pooling_head import choose_pooling
from baton.engine.runner.sampling.logits_processors import versions
from baton.engine.runner.weights.open_weights import open_weights
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader
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


def load_encoder_weights(
    config: EncoderConfig,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
) -> EncoderWeights:
    """Check and load them. Raises ModelError if the files do not fit the configuration."""
    tensors = EncoderTensors(config, files.shapes())
    check_encoder_tensors(tensors, files)
    loader = TensorLoader(tensors.shapes(), files, target, on_progress)
    return _WeightLoader(tensors, loader).load()


class _WeightLoader:
    def __init__(self, tensors: EncoderTensors, loader: TensorLoader) -> None:
        self._tensors = tensors
        self._config = tensors.config
        self._names = tensors.names
        self._loader = loader

    def load(self) -> EncoderWeights:
        config, full, names = self._config, self._tensors.full, self._names
        return EncoderWeights(
            self._embeddings(),
            [self._layer(index) for index in range(len(config.layers))],
            self._norm(full(names.final_norm)) if names.final_norm else None,
            None if config.classifier is None else self._classifier(config.classifier),
        )

    def _embeddings(self) -> EmbeddingTables:
        names, full, loader = self._names, self._tensors.full, self._loader
        return EmbeddingTables(
            words=loader.embedding(full(names.words)),
            positions=loader.plain_matrix(full(names.positions)) if names.positions else None,
            token_types=loader.plain_matrix(full(names.token_types)) if names.token_types else None,
            norm=self._norm(full(names.embedding_norm)),
        )

    def _layer(self, index: int) -> EncoderLayer:
        config, names, loader = self._config, self._names, self._loader

        def full(name: str) -> str:
            return self._tensors.in_layer(index, name)

        attention_norm = None
        if config.has_attention_norm(index):
            attention_norm = self._norm(full(names.attention_norm))
        return EncoderLayer(
            attention_norm=attention_norm,
            qkv=loader.linear([full(name) for name in names.qkv], config.has_attention_bias),
            output=loader.linear([full(names.output)], config.has_attention_bias),
            mlp_norm=self._norm(full(names.mlp_norm)),
            up=loader.linear([full(names.up)], config.has_mlp_bias),
            down=loader.linear([full(names.down)], config.has_mlp_bias),
        )

    def _classifier(self, classifier: ClassifierConfig) -> ClassifierWeights:
        names, in_head, vector = self._names, self._tensors.in_head, self._loader.vector
        dense, labels = in_head(names.dense), in_head(names.labels)
        return ClassifierWeights(
            dense=vector(f"{dense}.weight"),
            dense_bias=vector(f"{dense}.bias") if classifier.has_dense_bias else None,
            norm=self._norm(in_head(names.dense_norm)) if classifier.has_norm else None,
            labels=vector(f"{labels}.weight"),
            labels_bias=vector(f"{labels}.bias"),
        )

    def _norm(self, name: str) -> LayerNorm:
        bias = self._loader.vector(f"{name}.bias") if self._config.has_norm_bias else None
        return LayerNorm(self._loader.vector(f"{name}.weight"), bias, self._config.norm_epsilon)
