"""Roofline of a model: the time of a step that only reads weights and KV and multiplies.

A step reads each matrix once and of the experts those that its tokens choose. In the last layer,
tokens that are not sampled need only their keys and values. Latent attention (MLA) is computed in
absorbed form. Norms, biases, embedding look-ups and the scales of quantized weights are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.checkpoint.checkpoint import Checkpoint
from baton.engine.runner.attention.byte_kv import scale_bytes
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.load import KV_DTYPES
from baton.engine.runner.model.config import (
    AltUpConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    Recurrence,
    RecurrentConfig,
)
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.weights.packed import is_packed
from baton.engine.runner.weights.tensor_names import TensorMap

# With int4, some matrices of a layer have six bits: about four tenths of the numbers.
BYTES_OF_NUMBER = {"none": 2.0, "int8": 1.0, "int4": 0.6}
HEAD_BYTES_OF_NUMBER = {"none": 2.0, "int8": 1.0, "int4": 0.75}
KV_NUMBER_BYTES = 2.0
STATE_NUMBER_BYTES = 4  # read and written once per step
STATE_PRODUCTS = 3  # of each number and token: what it recalls, its change and the output
MAMBA_PRODUCTS = 2  # nothing is recalled

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
    layers = [
        _layer_work(config.of_layer(index), layer) for index, layer in enumerate(config.layers)
    ]
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
        self._tensors = TensorMap(config, shapes)

    def of_attention(self) -> float:
        layer = self._config.attention_layers[0]
        return self._of(self._tensors.in_layer(layer, self._tensors.names.output))

    def of_head(self, unquantized: float) -> float:
        name = self._tensors.head
        if self._config.ties_embeddings:
            name = self._tensors.embedding
        return self._in_file(name) or unquantized

    def of_experts(self) -> float:
        experts = self._tensors.names.experts
        sparse = [i for i, layer in enumerate(self._config.layers) if layer.has_experts]
        if experts is None or not sparse:
            return self._unquantized
        return self._of(self._tensors.in_layer(sparse[0], experts.down.format(expert=0)))

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


def _layer_work(config: ModelConfig, layer: LayerConfig) -> LayerWork:
    hidden, moe = config.hidden_size, config.moe
    if not layer.has_experts:
        moe = None
    matrices = 3 if config.activation.is_gated else 2
    keys, other, unquantized = _mixer_numbers(config, layer)
    other += matrices * layer.mlp_size * hidden
    if config.per_layer is not None:
        other += 3 * config.per_layer.size * hidden
    if config.altup is not None:
        count = config.altup.num_streams
        other += 2 * config.altup.laurel_rank * hidden
        unquantized += count * (hidden + count + count**2)
    if moe is not None:
        shared_gate = hidden if moe.has_shared_gate else 0
        other += (moe.num_experts + matrices * moe.shared_size) * hidden + shared_gate
        other += 2 * (moe.latent_size or 0) * hidden
    return LayerWork(
        span=layer,
        kv_numbers=keys,
        other_numbers=other,
        expert_numbers=0
        if moe is None
        else matrices * moe.expert_size * (moe.latent_size or hidden),
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


def _mixer_numbers(config: ModelConfig, layer: LayerConfig) -> tuple[int, int, int]:
    """Return the numbers of keys and values, of other matrices, and of those kept unquantized."""
    recurrent, hidden = config.recurrent, config.hidden_size
    keys, other, unquantized = (
        (0, 0, 0) if layer.is_recurrent else _attention_numbers(config, layer)
    )
    if recurrent is None or not layer.has_state:
        return keys, other, unquantized
    inputs = recurrent.num_channels + recurrent.num_values
    other += (inputs + recurrent.num_values) * hidden
    _, gate_rows = RULES[recurrent.rule].stored_rows(recurrent)
    gates = len(gate_rows) * hidden + recurrent.num_channels * recurrent.conv_size
    if recurrent.rule is Recurrence.KIMI_DELTA:  # output gates and decays by two matrices in turn
        rank, heads = recurrent.value_dim, recurrent.num_value_heads
        other += rank * (hidden + recurrent.num_values) - recurrent.num_values * hidden
        num_decays = heads * recurrent.num_decays
        gates += rank * (hidden + num_decays) - num_decays * hidden
    return keys, other, unquantized + gates


def _is_mamba(config: ModelConfig) -> bool:
    return config.recurrent is not None and config.recurrent.rule is Recurrence.MAMBA2


def _state_numbers(recurrent: RecurrentConfig | None) -> int:
    if recurrent is None:
        return 0
    return recurrent.num_value_heads * recurrent.key_dim * recurrent.value_dim


def _attention_numbers(config: ModelConfig, layer: LayerConfig) -> tuple[int, int, int]:
    """Return the numbers of keys and values, of queries and output, and of absorbed matrices."""
    hidden, heads, latent = config.hidden_size, config.num_heads, config.latent
    if latent is None:
        num_projections = 0 if layer.kv_layer is not None else 1 + layer.has_value_projection
        kv_numbers = num_projections * config.num_kv_heads * config.head_dim * hidden
        num_matrices = 3 if config.has_output_gate else 2  # queries and output, and the gate
        return kv_numbers, num_matrices * heads * config.head_dim * hidden, 0
    queries = heads * (latent.nope_dim + latent.rope_dim)
    rank = latent.query_rank
    query_numbers = queries * hidden if rank is None else rank * (hidden + queries)
    output = heads * latent.value_dim * hidden
    absorbed = heads * (latent.nope_dim + latent.value_dim) * latent.rank
    return config.head_dim * hidden, query_numbers + output, absorbed


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
