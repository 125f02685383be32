"""Loads the weights of an encoder."""

from __future__ import annotations

from baton.checkpoint.checkpoint import Tensors
from baton.engine.runner.encoders.config import ClassifierConfig, EncoderConfig
from baton.engine.runner.encoders.tensor_names import EncoderTensors, check_encoder_tensors
from baton.engine.runner.encoders.weights import (
    ClassifierWeights,
    EmbeddingTables,
    EncoderLayer,
    EncoderWeights,
)
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader


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
