"""Tensors of an encoder: which its folder must contain, and their loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.weight_files import FLOATS
from baton.engine.runner.encoders.config import ClassifierConfig, EncoderConfig
from baton.engine.runner.encoders.ops import (
    ClassifierWeights,
    EmbeddingTables,
    EncoderLayer,
    EncoderWeights,
)
from baton.engine.runner.encoders.read_config import architecture_family
from baton.engine.runner.encoders.table import MODEL
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.weights.loader import Stack, WeightLoader
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader


class EncoderTensors:
    """Names of an encoder's tensors, as a folder spells them that has the tensors `found`."""

    def __init__(self, config: EncoderConfig, found: Mapping[str, Shape]) -> None:
        self.config = config
        self.names = names = architecture_family(config.architecture).names
        present = [each for each in names.prefixes if f"{each}{names.words}.weight" in found]
        self._prefix = (present or names.prefixes)[0]

    def full(self, name: str) -> str:
        """Return the name of a tensor that belongs to no layer."""
        return f"{self._prefix}{name}"

    def in_layer(self, index: int, name: str) -> str:
        return f"{self._prefix}{self.names.layers}.{index}.{name}"

    def in_head(self, name: str) -> str:
        return name.replace(MODEL, self._prefix)

    def is_ignored(self, name: str) -> bool:
        """Return whether texts need no such tensor: heads for tokens, buffers, unused poolers."""
        return name.removeprefix(self._prefix).startswith(self.names.ignored)

    def record(self) -> WeightLoader:
        """Return what the weights are loaded from."""
        recorder = WeightLoader()
        _EncoderLoader(self, recorder).load()
        return recorder


def encoder_shapes(config: EncoderConfig) -> dict[str, Shape]:
    """Return the names and shapes of a new folder's tensors."""
    return EncoderTensors(config, {}).record().shapes()


def check_encoder_tensors(tensors: EncoderTensors, files: Tensors) -> WeightLoader:
    """Raise ModelError unless the files hold every tensor in its shape, and no other."""
    recorded = tensors.record()
    expected = {name: Expected(shape, FLOATS) for name, shape in recorded.shapes().items()}
    files.check(expected, tensors.is_ignored)
    return recorded


def load_encoder_weights(
    config: EncoderConfig,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
) -> EncoderWeights:
    """Check and load them. Raises ModelError if the files do not fit the configuration."""
    tensors = EncoderTensors(config, files.shapes())
    num_expected = check_encoder_tensors(tensors, files).num_loaded
    loader = TensorLoader(files, target, on_progress=on_progress, num_expected=num_expected)
    return _EncoderLoader(tensors, loader).load()


class _EncoderLoader:
    def __init__(self, tensors: EncoderTensors, loader: WeightLoader) -> None:
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
        config, names, loader = self._config, self._names, self._loader

        def table(name: str, num_rows: int) -> Stack:
            return Stack([self._tensors.full(name)], [num_rows], config.hidden_size)

        positions, token_types = (
            loader.matrix(table(name, num_rows)) if name else None
            for name, num_rows in (
                (names.positions, config.num_positions),
                (names.token_types, config.num_token_types),
            )
        )
        return EmbeddingTables(
            words=loader.embedding(table(names.words, config.vocab_size)),
            positions=positions,
            token_types=token_types,
            norm=self._norm(self._tensors.full(names.embedding_norm)),
        )

    def _layer(self, index: int) -> EncoderLayer:
        config, names, hidden = self._config, self._names, self._config.hidden_size

        def full(name: str) -> str:
            return self._tensors.in_layer(index, name)

        def linear(stored: Sequence[str], num_rows: int, columns: int, has_bias: bool) -> Linear:
            rows = [num_rows // len(stored)] * len(stored)
            return self._loader.linear(Stack(list(map(full, stored)), rows, columns, has_bias))

        attention_norm = None
        if config.has_attention_norm(index):
            attention_norm = self._norm(full(names.attention_norm))
        up_rows = (1 + config.is_gated) * config.mlp_size
        return EncoderLayer(
            attention_norm=attention_norm,
            qkv=linear(names.qkv, 3 * hidden, hidden, config.has_attention_bias),
            output=linear([names.output], hidden, hidden, config.has_attention_bias),
            mlp_norm=self._norm(full(names.mlp_norm)),
            up=linear([names.up], up_rows, hidden, config.has_mlp_bias),
            down=linear([names.down], hidden, config.mlp_size, config.has_mlp_bias),
        )

    def _classifier(self, classifier: ClassifierConfig) -> ClassifierWeights:
        names, in_head, loader = self._names, self._tensors.in_head, self._loader
        dense, labels, hidden = (
            in_head(names.dense),
            in_head(names.labels),
            self._config.hidden_size,
        )
        return ClassifierWeights(
            dense=loader.vector(f"{dense}.weight", hidden, hidden),
            dense_bias=loader.vector(f"{dense}.bias", hidden)
            if classifier.has_dense_bias
            else None,
            norm=self._norm(in_head(names.dense_norm)) if classifier.has_norm else None,
            labels=loader.vector(f"{labels}.weight", classifier.num_labels, hidden),
            labels_bias=loader.vector(f"{labels}.bias", classifier.num_labels),
        )

    def _norm(self, name: str) -> LayerNorm:
        size, loader = self._config.hidden_size, self._loader
        bias = loader.vector(f"{name}.bias", size) if self._config.has_norm_bias else None
        return LayerNorm(loader.vector(f"{name}.weight", size), bias, self._config.norm_epsilon)
