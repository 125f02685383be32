"""Roofline of a model: the time of a step that only reads weights and KV and multiplies.

A step reads each matrix once and of the experts those that its tokens choose. In the last layer,
tokens that are not sampled need only their keys and values. Latent attention (MLA) is computed in
absorbed form. Norms, biases, embedding look-ups and the scales of quantized weights are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.checkpoint.checkpoint import Checkpoint
from baton.engine.runner.attention.byte_kv import scale_bytes
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.load import KV_DTYPES
from baton.engine.runner.model.adapters import Place
from baton.engine.runner.model.config import (
    AltUpConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    Recurrence,
    RecurrentConfig,
)
from baton.engine.runner.weights.decoder_weights import record_layer
from baton.engine.runner.weights.packed import is_packed
from baton.engine.runner.weights.tensor_names import TensorMap

# With int4, some matrices of a layer have six bits: about four tenths of the numbers.
BYTES_OF_NUMBER = {"none": 2.0, "int8": 1.0, "int4": 0.6}
HEAD_BYTES_OF_NUMBER = {"none": 2.0, "int8": 1.0, "int4": 0.75}
KV_NUMBER_BYTES = 2.0
STATE_NUMBER_BYTES = 4  # read and written once per step
STATE_PRODUCTS = 3  # of each number and token: what it recalls, its change and the output
MAMBA_PRODUCTS = 2  # nothing is recalled
CONVOLUTION_DIMS = 3  # channels, 1, taps

CountExperts = Callable[[int], float]  # different experts that so many tokens choose


@dataclass(frozen=True, slots=True)
class StepWork:
    """New tokens at the end of sequences of equal length. The last token of each is sampled."""

    num_sequences: int
    num_new: int  # in each sequence
    context_len: int  # with the new tokens

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_new

    def only_sampled(self) -> StepWork:
        return StepWork(self.num_sequences, 1, self.context_len)


def prompt_of(num_tokens: int) -> StepWork:
    return StepWork(1, num_tokens, num_tokens)


def batch_of(num_sequences: int, context_len: int) -> StepWork:
    return StepWork(num_sequences, 1, context_len)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Numbers of weights of a layer, and the slots that its tokens attend to."""

    span: LayerConfig  # window, chunk, or a recurrent state
    kv_numbers: int
    other_numbers: int  # all else that each token needs
    expert_numbers: int
    top_k: int
    unquantized_numbers: int = 0  # that each token needs
    state_numbers: int = 0  # of a sequence's recurrent state, in float32
    state_products: int = STATE_PRODUCTS
    # Of layers of unlike sizes; 0: as `Work` says.
    slot_numbers: int = 0
    pair_products: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Minimum cost of a step."""

    layers: Sequence[LayerWork]
    moe: MoeConfig | None
    head_numbers: int
    number_bytes: float
    expert_number_bytes: float
    head_number_bytes: float
    slot_numbers: int  # keys and values of a slot in one layer
    pair_products: int  # of a token and a slot that it attends to, in one layer
    kv_number_bytes: float = KV_NUMBER_BYTES

    def seconds(
        self, step: StepWork, count_experts: CountExperts, bytes_per_s: float, flops_per_s: float
    ) -> float:
        """Return the longer of read time and compute time, which can overlap."""
        read = self._read_bytes(step, count_experts)
        return max(read / bytes_per_s, 2 * self._products(step) / flops_per_s)

    def _read_bytes(self, step: StepWork, count_experts: CountExperts) -> float:
        read = self.head_numbers * self.head_number_bytes
        for layer, needed in self._steps(step):
            read += (layer.kv_numbers + layer.other_numbers) * self.number_bytes
            read += layer.unquantized_numbers * BYTES_OF_NUMBER["none"]
            if layer.top_k:
                experts = count_experts(needed.num_tokens) * layer.expert_numbers
                read += experts * self.expert_number_bytes
            read += 2 * needed.num_sequences * layer.state_numbers * STATE_NUMBER_BYTES
            num_slots = needed.num_sequences * _num_slots(layer.span, needed)
            slot_numbers = layer.slot_numbers or self.slot_numbers
            read += num_slots * slot_numbers * self.kv_number_bytes
        return read

    def _products(self, step: StepWork) -> int:
        products = self.head_numbers * step.num_sequences
        for layer, needed in self._steps(step):
            per_token = layer.other_numbers + layer.unquantized_numbers
            per_token += layer.top_k * layer.expert_numbers
            per_token += layer.state_products * layer.state_numbers
            products += layer.kv_numbers * step.num_tokens + per_token * needed.num_tokens
            num_pairs = needed.num_sequences * _num_pairs(layer.span, needed)
            products += num_pairs * (layer.pair_products or self.pair_products)
        return products

    def _steps(self, step: StepWork) -> Iterator[tuple[LayerWork, StepWork]]:
        """Yield each layer with the tokens that need more of it than keys and values."""
        writers = [index for index, layer in enumerate(self.layers) if layer.span.kv_layer is None]
        for index, layer in enumerate(self.layers):
            yield layer, step if index < writers[-1] else step.only_sampled()


def expect_experts(moe: MoeConfig | None) -> CountExperts:
    """Return the expected number of different experts if all are chosen equally often."""
    if moe is None:
        return lambda _num_tokens: 0.0
    skipped = 1 - moe.top_k / moe.num_experts
    return lambda num_tokens: moe.num_experts * (1 - skipped**num_tokens)


def work_of(checkpoint: Checkpoint, quantize: str, kv_cache_dtype: str = "auto") -> Work:
    """Return the work of a model. `quantize` applies to plain matrices of the checkpoint."""
    config = read_model_config(checkpoint)
    stored = _StoredBytes(config, checkpoint, BYTES_OF_NUMBER[quantize])
    layers = [_layer_work(stored.tensors, index) for index in range(config.num_layers)]
    return Work(
        layers=layers if config.altup is None else _with_streams(config, config.altup, layers),
        moe=config.moe,
        head_numbers=config.vocab_size * config.hidden_size,
        number_bytes=stored.of_attention(),
        expert_number_bytes=stored.of_experts(),
        head_number_bytes=stored.of_head(HEAD_BYTES_OF_NUMBER[quantize]),
        slot_numbers=_slot_numbers(config),
        pair_products=_pair_products(config),
        kv_number_bytes=_kv_number_bytes(kv_cache_dtype, config.head_dim),
    )


def _with_streams(
    config: ModelConfig, altup: AltUpConfig, layers: Sequence[LayerWork]
) -> list[LayerWork]:
    """Add the projections into streams to the first layer, those out of them to the last one."""
    numbers = (altup.num_streams - 1) * config.hidden_size**2
    first, last = (
        replace(layer, other_numbers=layer.other_numbers + numbers)
        for layer in (layers[0], layers[-1])
    )
    return [first, *layers[1:-1], last]


def _kv_number_bytes(kv_cache_dtype: str, head_dim: int) -> float:
    if kv_cache_dtype == "auto":
        return KV_NUMBER_BYTES
    return 1 + scale_bytes(KV_DTYPES[kv_cache_dtype]) / head_dim


class _StoredBytes:
    """Bytes of a number in the matrices of a checkpoint, which can be quantized already.

    One matrix stands for all of its kind.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, unquantized: float) -> None:
        self._unquantized = unquantized
        self._config = config
        self._checkpoint = checkpoint
        with checkpoint.open_tensors() as tensors:
            shapes = tensors.shapes()
        self._names = frozenset(shapes)
        self.tensors = TensorMap(config, shapes)

    def of_attention(self) -> float:
        layer = self._config.attention_layers[0]
        return self._of(self.tensors.in_layer(layer, self.tensors.names.output))

    def of_head(self, unquantized: float) -> float:
        name = self.tensors.head
        if self._config.ties_embeddings:
            name = self.tensors.embedding
        return self._in_file(name) or unquantized

    def of_experts(self) -> float:
        experts = self.tensors.names.experts
        sparse = [i for i, layer in enumerate(self._config.layers) if layer.has_experts]
        if experts is None or not sparse:
            return self._unquantized
        return self._of(self.tensors.in_layer(sparse[0], experts.down.format(expert=0)))

    def _of(self, linear: str) -> float:
        how = self._config.quantization
        if how is None:
            return self._in_file(linear) or self._unquantized
        if how.is_float8 or not is_packed(linear, self._names, how):
            return self._unquantized  # FP8 is dequantized when it is loaded
        return how.bits / 8

    def _in_file(self, linear: str) -> float | None:
        """Return the bytes of a number in a GGUF file, or None if the matrix is not quantized."""
        name = f"{linear}.weight"
        if name not in self._names:
            return None
        with self._checkpoint.open_tensors() as tensors:
            parts = tensors.quantized(name)
        return parts[0].bits / 8 if parts else None


def _layer_work(tensors: TensorMap, index: int) -> LayerWork:
    config, layer = tensors.config.of_layer(index), tensors.config.layers[index]
    moe, recorded = config.moe if layer.has_experts else None, record_layer(tensors, index)
    # Inputs per layer are a part of a projection for all layers.
    keys, other = 0, 0 if config.per_layer is None else config.per_layer.size * config.hidden_size
    convolutions = [shape for shape in recorded.vectors if len(shape) == CONVOLUTION_DIMS]
    unquantized, experts = sum(map(math.prod, convolutions)), 0
    for stack in recorded.stacks:
        numbers, place = stack.num_rows * stack.columns, stack.place
        if place is not None and place.number is not None:
            experts += numbers
        elif stack.keeps_dtype:
            unquantized += numbers
        elif place == Place(index, "qkv") and not layer.is_recurrent:
            queries, *others = stack.row_parts
            other += queries * stack.columns
            keys += sum(others) * stack.columns
        else:
            other += numbers
    return LayerWork(
        span=layer,
        kv_numbers=keys,
        other_numbers=other,
        expert_numbers=0 if moe is None else experts // len(moe.loaded_experts),
        top_k=0 if moe is None else moe.top_k,
        unquantized_numbers=unquantized,
        state_numbers=_state_numbers(config.recurrent) if layer.has_state else 0,
        state_products=MAMBA_PRODUCTS if _is_mamba(config) else STATE_PRODUCTS,
        slot_numbers=_slot_numbers(config) if layer.kv_heads else 0,
        pair_products=_pair_products(config) if layer.kv_heads else 0,
    )


def _slot_numbers(config: ModelConfig) -> int:
    return config.num_kv_tensors * config.num_kv_heads * config.head_dim


def _pair_products(config: ModelConfig) -> int:
    value_dim = config.head_dim if config.latent is None else config.latent.rank
    return config.num_heads * (config.head_dim + value_dim)


def _is_mamba(config: ModelConfig) -> bool:
    return config.recurrent is not None and config.recurrent.rule is Recurrence.MAMBA2


def _state_numbers(recurrent: RecurrentConfig | None) -> int:
    if recurrent is None:
        return 0
    return recurrent.num_value_heads * recurrent.key_dim * recurrent.value_dim


def _num_slots(span: LayerConfig, step: StepWork) -> int:
    """Return the slots that the new tokens of a sequence attend to."""
    first = step.context_len - step.num_new
    return 0 if span.is_recurrent else step.num_new - 1 + _num_seen(span, first)


def _num_pairs(span: LayerConfig, step: StepWork) -> int:
    first = step.context_len - step.num_new
    return sum(_num_seen(span, position) for position in range(first, step.context_len))


def _num_seen(span: LayerConfig, position: int) -> int:
    """Return the slots that the token at `position` attends to."""
    if span.is_recurrent:
        return 0
    num_seen = position + 1
    if span.chunk is not None:
        num_seen = position % span.chunk + 1
    return num_seen if span.window is None else min(num_seen, span.window)
