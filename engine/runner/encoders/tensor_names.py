"""Names and shapes of the tensors that the folder of an encoder must contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.weight_files import FLOATS
from baton.engine.runner.encoders.config import ClassifierConfig, EncoderConfig
from baton.engine.runner.encoders.read_config import architecture_family
from baton.engine.runner.encoders.table import MODEL

Shapes = Iterator[tuple[str, Shape]]


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

    def shapes(self) -> dict[str, Shape]:
        return dict(self._shapes())

    def _shapes(self) -> Shapes:
        config, names = self.config, self.names
        sizes = {
            names.words: config.vocab_size,
            names.positions: config.num_positions,
            names.token_types: config.num_token_types,
        }
        for name, size in sizes.items():
            if name:
                yield f"{self.full(name)}.weight", (size, config.hidden_size)
        yield from self._norm(self.full(names.embedding_norm))
        if names.final_norm:
            yield from self._norm(self.full(names.final_norm))
        for index in range(len(config.layers)):
            yield from self._layer_shapes(index)
        if config.classifier is not None:
            yield from self._classifier_shapes(config.classifier)

    def _layer_shapes(self, index: int) -> Shapes:
        config, names, hidden = self.config, self.names, self.config.hidden_size
        if config.has_attention_norm(index):
            yield from self._norm(self.in_layer(index, names.attention_norm))
        yield from self._norm(self.in_layer(index, names.mlp_norm))
        rows = 3 * hidden // len(names.qkv)
        for name in names.qkv:
            yield from _linear(self.in_layer(index, name), rows, hidden, config.has_attention_bias)
        output = self.in_layer(index, names.output)
        yield from _linear(output, hidden, hidden, config.has_attention_bias)
        rows = (1 + config.is_gated) * config.mlp_size
        yield from _linear(self.in_layer(index, names.up), rows, hidden, config.has_mlp_bias)
        down = self.in_layer(index, names.down)
        yield from _linear(down, hidden, config.mlp_size, config.has_mlp_bias)

    def _classifier_shapes(self, classifier: ClassifierConfig) -> Shapes:
        names, hidden = self.names, self.config.hidden_size
        yield from _linear(self.in_head(names.dense), hidden, hidden, classifier.has_dense_bias)
        if classifier.has_norm:
            yield from self._norm(self.in_head(names.dense_norm))
        yield from _linear(self.in_head(names.labels), classifier.num_labels, hidden, True)

    def _norm(self, name: str) -> Shapes:
        yield f"{name}.weight", (self.config.hidden_size,)
        if self.config.has_norm_bias:
            yield f"{name}.bias", (self.config.hidden_size,)


def check_encoder_tensors(tensors: EncoderTensors, files: Tensors) -> None:
    """Raise ModelError unless the files hold every tensor in its shape, and no other."""
    expected = {name: Expected(shape, FLOATS) for name, shape in tensors.shapes().items()}
    files.check(expected, tensors.is_ignored)


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)
