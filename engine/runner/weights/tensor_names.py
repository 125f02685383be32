"""Names and shapes of the tensors that a model folder must contain."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.weight_files import FLOATS
from baton.core.errors import ModelError
from baton.engine.runner.families.family import NEXT_BLOCK, ExpertNames, TensorNames
from baton.engine.runner.families.table import FAMILIES
from baton.engine.runner.model.config import (
    AltUpConfig,
    LatentConfig,
    ModelConfig,
    MoeConfig,
    QkNorm,
    RecurrentConfig,
    RowScale,
)
from baton.engine.runner.model.quantization import Packing
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.weights.packed import (
    ATTENTION_SCALES,
    UNUSED,
    PackedPart,
    PartAxis,
    is_packed,
    mxfp4_parts,
    packed_parts,
)

# Size of an axis, or those of the parts that follow each other along it.
Axis = int | tuple[int, ...]
Shapes = Iterator[tuple[str, tuple[Axis, ...]]]
CLASSIFIER = "score"


class TensorMap:
    """Names of a model's tensors, as a folder spells them that has the tensors `found`."""

    def __init__(
        self,
        config: ModelConfig,
        found: Mapping[str, Shape] | None = None,
        layer_prefixes: Mapping[int, str] = {},
    ) -> None:
        """`layer_prefixes` are those of layers that have their own."""
        self.config = config
        self._layer_prefixes = layer_prefixes
        self._found = found = found or {}
        self.names: TensorNames = _choose_experts(config, found)
        names = zip(self.names.models, self.names.heads, strict=True)
        prefixes = [(f"{model}.", head) for model, head in names]
        prefixes.append(("", "lm_head"))  # saved without the class that has the head
        name = f"{self.names.embedding}.weight"
        present = [pair for pair in prefixes if f"{pair[0]}{name}" in found]
        self.prefix, self.head = (present or prefixes)[0]

    def of_shard(self, config: ModelConfig) -> TensorMap:
        """Return the tensors of a part of the model, which have the same names."""
        shard = copy(self)
        shard.config = config
        return shard

    @property
    def embedding(self) -> str:
        return f"{self.prefix}{self.names.embedding}"

    def in_layer(self, index: int, name: str) -> str:
        own = self._layer_prefixes.get(index)
        if own:
            return f"{own}{name}"
        block = self.config.layers[index].block
        if block is None:
            layer, stem = f"{self.prefix}layers.{index}.", name.removesuffix(".weight")
            other = self.names.spellings.get(stem, stem)
            chosen = other if f"{layer}{other}.weight" in self._found else stem
            return f"{layer}{chosen}{name.removeprefix(stem)}"
        relative = name.removeprefix(NEXT_BLOCK)
        return f"{self.prefix}layers.{block + (relative != name)}.{relative}"

    def in_layers(self, index: int, names: Sequence[str]) -> list[str]:
        return [self.in_layer(index, name) for name in names]

    def qkv(self, index: int) -> Sequence[str]:
        """Return the names of the projections of queries, keys and values that a layer has."""
        layer, names = self.config.layers[index], self.names.qkv
        if layer.kv_layer is not None:
            return names[:1]
        return names if layer.has_value_projection else names[:2]

    def stream_projections(self) -> Sequence[str]:
        """Return the names of the projections into streams, then of those out of them."""
        names, altup = self.names.altup, self.config.altup
        others = range(0 if altup is None else altup.num_streams - 1)
        kinds = (names.projections, names.unembed_projections)
        return [f"{self.prefix}{kind}.{number}" for kind in kinds for number in others]

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each tensor as if no matrix was quantized."""
        return {name: _shape(axes) for name, axes in self._shapes()}

    def parts(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the sizes of the parts along each axis of each tensor; most have one part."""
        return {name: tuple(map(_parts_of, axes)) for name, axes in self._shapes()}

    def shapes_of_layer(self, index: int) -> dict[str, Shape]:
        """Return the shape of each tensor of a layer, as `shapes` does."""
        layer = self._layer_shapes(index)
        return {self.in_layer(index, name): _shape(axes) for name, axes in layer}

    def row_scales(self) -> Mapping[str, Sequence[RowScale]]:
        """Return the scales of the rows of matrices that have any, by the names of these."""
        scales = self.config.row_scales
        scaled = {each.matrix for each in scales if each.scale != 1.0}
        return {
            self.in_layer(index, name): [each for each in scales if each.matrix == name]
            for index in range(self.config.num_layers)
            for name in scaled
        }

    def is_ignored(self, name: str) -> bool:
        """Return whether text needs no such tensor: tied heads, rotary buffers, images, MTP."""
        if name == f"{self.head}.weight" or name.endswith("rotary_emb.inv_freq"):
            return True
        if name.endswith(ATTENTION_SCALES):
            return True
        if self.config.quantization is not None and name.endswith(UNUSED):
            return True
        # Layers after the last one predict several tokens at once.
        block = self.config.layers[-1].block
        after_last = self.config.num_layers if block is None else block + 2
        predictor = f"{self.prefix}layers.{after_last}."
        return name.startswith((predictor, *self._unread, *self.names.ignored))

    @cached_property
    def _unread(self) -> tuple[str, ...]:
        """Tensors of keys and values that layers do not compute, although a folder has them."""
        config, names = self.config, self.names
        return tuple(
            f"{self.in_layer(index, name)}."
            for index, layer in enumerate(config.layers)
            if layer.kv_layer is not None
            for name in (*names.qkv[1:], names.k_norm)
        )

    def _shapes(self) -> Shapes:
        config = self.config
        yield f"{self.embedding}.weight", (config.vocab_size, config.hidden_size)
        yield f"{self.prefix}{self.names.norm}.weight", (config.hidden_size,)
        if config.num_labels and config.label_tokens is None:
            yield f"{CLASSIFIER}.weight", (config.num_labels, config.hidden_size)
        if not config.ties_embeddings:
            yield f"{self.head}.weight", (config.vocab_size, config.hidden_size)
        if config.per_layer is not None:
            size, names = config.per_layer.size, self.names.per_layer
            rows = config.num_layers * size
            yield f"{self.prefix}{names.embedding}.weight", (config.per_layer.vocab_size, rows)
            yield f"{self.prefix}{names.projection}.weight", (rows, config.hidden_size)
            yield f"{self.prefix}{names.norm}.weight", (size,)
        if config.altup is not None:
            for name in self.stream_projections():
                yield f"{name}.weight", (config.hidden_size, config.hidden_size)
        for index in range(config.num_layers):
            for name, shape in self._layer_shapes(index):
                yield self.in_layer(index, name), shape

    def _layer_shapes(self, index: int) -> Shapes:
        config, layer = self.config, self.config.layers[index]
        names = self.names.of_layer(layer)
        mlp_norms = (names.mlp_norm, names.mlp_output_norm) if layer.has_mlp else ()
        for norm in (names.input_norm, names.attention_norm, *mlp_norms):
            if norm:
                yield f"{norm}.weight", (config.hidden_size,)
        yield from self._attention_shapes(index)
        if config.has_layer_scale:
            yield names.layer_scale, (1,)
        if config.per_layer is not None:
            size, own = config.per_layer.size, names.per_layer
            yield from _linear(own.layer_gate, size, config.hidden_size, False)
            yield from _linear(own.layer_projection, config.hidden_size, size, False)
            yield f"{own.layer_norm}.weight", (config.hidden_size,)
        if config.altup is not None:
            yield from self._altup_shapes(config.altup)
        if layer.mlp_size:
            yield from self._mlp_shapes(names.gate_up, names.down, layer.mlp_size)
        if layer.has_experts and config.moe is not None and names.experts is not None:
            yield from self._moe_shapes(config.moe, names.experts)
            if layer.has_parallel_experts:
                yield from self._parallel_shapes(config.moe)

    def _altup_shapes(self, altup: AltUpConfig) -> Shapes:
        hidden, names, count = self.config.hidden_size, self.names.altup, altup.num_streams
        yield from _linear(names.router, count, hidden, False)
        yield f"{names.router_norm}.weight", (hidden,)
        yield from _linear(names.prediction, count * count, count, False)
        yield from _linear(names.correction, count, count, False)
        yield names.output_scale, (hidden,)
        left, right = names.laurel
        yield from _linear(left, altup.laurel_rank, hidden, False)
        yield from _linear(right, hidden, altup.laurel_rank, False)
        yield f"{names.laurel_norm}.weight", (hidden,)

    def _attention_shapes(self, index: int) -> Shapes:
        config, names = self.config.of_layer(index), self.names
        if config.recurrent is not None and config.layers[index].has_state:
            yield from self._recurrent_shapes(config.recurrent)
        if config.layers[index].is_recurrent:
            return
        if config.latent is not None:
            yield from self._latent_shapes(config.latent)
            return
        hidden, heads = config.hidden_size, (config.num_heads, config.num_kv_heads)
        queries, keys = (count * config.head_dim for count in heads)
        gated = 2 * queries if config.has_output_gate else queries
        rows: Sequence[Axis] = (gated, keys, keys)
        rows = rows if len(names.qkv) == 3 else [(gated, keys, keys)]
        for name, count in zip(self.qkv(index), rows, strict=False):
            yield from _linear(name, count, hidden, config.has_qkv_bias)
        yield from _linear(names.output, hidden, queries, config.has_output_bias)
        kind = config.layers[index].qk_norm
        if kind in (QkNorm.HEAD, QkNorm.ALL_HEADS, QkNorm.ROTATED):
            is_wide = kind is QkNorm.ALL_HEADS
            yield f"{names.q_norm}.weight", (queries if is_wide else config.head_dim,)
            if config.layers[index].kv_layer is None:
                yield f"{names.k_norm}.weight", (keys if is_wide else config.head_dim,)
        if config.has_sinks:
            yield names.sinks, (config.num_heads,)

    def _recurrent_shapes(self, recurrent: RecurrentConfig) -> Shapes:
        hidden, values = self.config.hidden_size, recurrent.num_values
        names, rule = self.names.recurrent, RULES[recurrent.rule]
        num_rows, num_gates = map(len, rule.stored_rows(recurrent))
        parts = [recurrent.num_keys, recurrent.num_keys, values]
        rows = [*parts, values]
        if len(names.projections) == 2:
            rows = [recurrent.num_channels, values]
        elif len(names.projections) == 1:
            rows = [num_rows + (0 if names.gates else num_gates)]
        gates = [num_gates // len(names.gates) for _ in names.gates]
        if names.low_rank:
            rows, gates = parts, [recurrent.num_value_heads]
            rank, num_decays = recurrent.value_dim, recurrent.num_value_heads * recurrent.num_decays
            for (down, up), count in zip(names.low_rank, (values, num_decays), strict=True):
                yield f"{down}.weight", (rank, hidden)
                yield f"{up}.weight", (count, rank)
        for name, count in zip((*names.projections, *names.gates), (*rows, *gates), strict=True):
            yield f"{name}.weight", (count, hidden)
        for name, shape in rule.shapes(recurrent).items():
            stored = names.stored(name)
            sizes = shape[:1] if len(stored) == 1 else parts
            for each, size in zip(stored, sizes, strict=True):
                yield each, (size, *shape[1:])
        yield f"{names.output}.weight", (hidden, values)

    def _latent_shapes(self, latent: LatentConfig) -> Shapes:
        config, names = self.config, self.names.latent
        queries = config.num_heads * (latent.nope_dim + latent.rope_dim)
        if latent.query_rank is None:
            yield f"{names.query}.weight", (queries, config.hidden_size)
        else:
            yield f"{names.query_down}.weight", (latent.query_rank, config.hidden_size)
            yield f"{names.query_norm}.weight", (latent.query_rank,)
            yield f"{names.query_up}.weight", (queries, latent.query_rank)
        values = config.num_heads * latent.value_dim
        keys = config.num_heads * latent.nope_dim
        yield f"{names.key_down}.weight", (latent.rank + latent.rope_dim, config.hidden_size)
        yield f"{names.key_norm}.weight", (latent.rank,)
        yield f"{names.key_up}.weight", (keys + values, latent.rank)
        yield f"{self.names.output}.weight", (config.hidden_size, values)

    def _mlp_shapes(self, gate_up: Sequence[str], down: str, size: int) -> Shapes:
        hidden, has_bias = self.config.hidden_size, self.config.has_mlp_bias
        is_stacked = self.config.activation.is_gated and len(gate_up) == 1
        for name in gate_up:
            yield from _linear(name, (size, size) if is_stacked else size, hidden, has_bias)
        yield from _linear(down, hidden, size, has_bias)

    def _parallel_shapes(self, moe: MoeConfig) -> Shapes:
        hidden, names = self.config.hidden_size, self.names.parallel
        yield names.router_scale, (hidden,)
        yield names.expert_scales, (moe.num_experts,)
        for norm in (names.dense_output_norm, names.experts_norm, names.experts_output_norm):
            yield f"{norm}.weight", (hidden,)

    def _moe_shapes(self, moe: MoeConfig, names: ExpertNames) -> Shapes:
        hidden = self.config.hidden_size
        yield from _linear(names.router, moe.num_experts, hidden, moe.has_bias)
        if names.correction_bias:
            row = (1,) if names.has_correction_row else ()
            yield names.correction_bias, (*row, moe.num_experts)
        yield from _expert_shapes(moe, names, hidden)
        if moe.latent_size is not None:
            yield f"{names.latent[0]}.weight", (moe.latent_size, hidden)
            yield f"{names.latent[1]}.weight", (hidden, moe.latent_size)
        if moe.shared_size:
            gate_up = [f"{names.shared}.{name}" for name in names.shared_gate_up]
            down = f"{names.shared}.{names.shared_down}"
            yield from self._mlp_shapes(gate_up, down, moe.shared_size)
        if moe.has_shared_gate:
            yield f"{names.shared_gate}.weight", (1, hidden)


def check_tensors(config: ModelConfig, files: Tensors) -> None:
    """Raise ModelError unless the files hold every tensor in its shape, and no other."""
    tensors = TensorMap(config, files.shapes())
    stored = {
        part.name: Expected(part.shape, part.dtypes)
        for parts in stored_parts(tensors, files.names()).values()
        for part in parts
    }
    files.check(stored, tensors.is_ignored)


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of a new folder's tensors."""
    return TensorMap(config).shapes()


def stored_parts(tensors: TensorMap, names: Collection[str]) -> dict[str, Sequence[PackedPart]]:
    """Return each tensor as it is stored: a quantized matrix consists of several parts."""
    names = frozenset(names)
    return {
        name: list(_packed_parts(tensors, name, shape, names))
        or [PackedPart.of(name, shape, FLOATS, *map(PartAxis, range(len(shape))))]
        for name, shape in tensors.shapes().items()
    }


def _packed_parts(
    tensors: TensorMap, name: str, shape: Shape, names: Collection[str]
) -> Iterator[PackedPart]:
    """Yield the tensors that store a quantized matrix, or nothing if `name` is not quantized."""
    linear, how = name.removesuffix(".weight"), tensors.config.quantization
    if how is None or not is_packed(linear, names, how):
        return
    if len(shape) == 2 and how.packing is not Packing.MXFP4:
        yield from packed_parts(linear, shape, names, how)
    elif len(shape) == 3 and how.packing is Packing.MXFP4:
        experts = tensors.names.experts
        is_transposed = experts is not None and experts.is_transposed
        yield from mxfp4_parts(linear, shape, is_transposed=is_transposed)
    else:
        raise ModelError(f"{name} of {how.packing.value} is not supported")


def _choose_experts(config: ModelConfig, found: Mapping[str, Shape]) -> TensorNames:
    """Return the family's names, with the form in which the folder stores its experts."""
    names = FAMILIES[config.architecture].names
    if config.moe is None or names.experts is None:
        return names
    for form in (names.experts, *names.experts.others):
        if _is_found(form, config.moe, config.hidden_size, found):
            return replace(names, experts=form)
    return names


def _is_found(
    form: ExpertNames, moe: MoeConfig, hidden_size: int, found: Mapping[str, Shape]
) -> bool:
    """Return whether the tensors of a folder include experts of this form."""
    if "{expert}" in form.down:  # each can consist of the parts of a quantized matrix
        part = form.down.format(expert=0)
        return any(f".{part}." in name for name in found)
    return all(
        any(name.endswith(f".{tensor}") and found[name] == _shape(axes) for name in found)
        for tensor, axes in _expert_shapes(moe, form, hidden_size)
    )


def _shape(axes: Sequence[Axis]) -> Shape:
    return tuple(sum(_parts_of(axis)) for axis in axes)


def _parts_of(axis: Axis) -> tuple[int, ...]:
    return (axis,) if isinstance(axis, int) else axis


def _linear(name: str, rows: Axis, columns: int, has_bias: bool) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def _expert_shapes(moe: MoeConfig, names: ExpertNames, hidden_size: int) -> Shapes:
    hidden_size = moe.latent_size or hidden_size
    size = moe.expert_size
    rows: Axis = size
    if names.is_gated and len(names.gate_up) == 1:
        rows = 2 * size if names.is_interleaved else (size, size)
    for name in names.gate_up:
        yield from _experts(name, moe, names, rows, hidden_size)
    yield from _experts(names.down, moe, names, hidden_size, moe.expert_size)


def _experts(name: str, moe: MoeConfig, names: ExpertNames, rows: Axis, columns: int) -> Shapes:
    if "{expert}" in name:
        for expert in moe.loaded_experts:
            yield from _linear(name.format(expert=expert), rows, columns, moe.has_bias)
        return
    shape = (columns, rows) if names.is_transposed else (rows, columns)
    count = len(moe.loaded_experts)
    yield f"{name}.weight" if names.has_weight_suffix else name, (count, *shape)
    if moe.has_bias:
        yield f"{name}_bias", (count, rows)
