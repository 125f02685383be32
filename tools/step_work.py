"""Work of each kernel of a greedy step, counted from a model's config. Imports no torch.

The launches are those of `--kernels triton`. A kernel reads each of its inputs once, and numbers
are bfloat16. Copies of a step's input to the GPU are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from baton.engine.runner.families.family import TensorNames
from baton.engine.runner.families.table import FAMILIES
from baton.engine.runner.model.config import LayerConfig, ModelConfig, QkNorm
from baton.engine.runner.triton.attention.context_split import (
    FLOAT_BYTES,
    NUM_ROWS,
    NUM_SUMS,
    SEGMENT_KEYS,
    count_segments,
    count_tiles,
    round_context,
    split_context,
)

NUMBER_BYTES = 2  # of weights, activations, keys and values


class Kind(Enum):
    ATTENTION = "attention"
    PRODUCT = "products"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens at the end of sequences of equal length. The last token of each is sampled."""

    name: str
    num_sequences: int
    num_new: int  # in each sequence
    context_len: int  # with the new tokens

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_new

    @property
    def sampled(self) -> Step:
        """Return the step without the tokens that are not sampled."""
        return Step(self.name, self.num_sequences, 1, self.context_len)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a launch, or of the two of one name."""

    kernel: str
    kind: Kind
    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0  # of products: a multiplication and an addition are two
    launches: int = 1

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def step_works(config: ModelConfig, step: Step, num_processors: int) -> Iterator[Work]:
    """Yield the launches of a step."""
    yield from input_works(config, step)
    names, last = FAMILIES[config.architecture].names, len(config.layers) - 1
    for index, layer in enumerate(config.layers):
        needed = step.sampled if index == last else step
        if names.input_norm and index == 0:  # those of other layers follow a sum
            yield norm("norm", step.num_tokens, config.hidden_size)
        yield from attention_works(config, names, layer, step, needed, num_processors)
        yield from mlp_works(config, names, layer, needed, norms_next=index < last)
    yield from output_works(config, step)


def held_bytes(config: ModelConfig, works: Iterable[Work]) -> int:
    """Return the bytes of the weights, and of the keys and values that a step reads."""
    embedding = 0 if config.ties_embeddings else config.vocab_size * config.hidden_size
    return embedding * NUMBER_BYTES + sum(work.weight_bytes + work.kv_bytes for work in works)


def input_works(config: ModelConfig, step: Step) -> Iterator[Work]:
    yield elementwise("embed", 2 * step.num_tokens * config.hidden_size)
    if config.embedding_scale != 1.0:
        yield elementwise("scale embeddings", 2 * step.num_tokens * config.hidden_size)
    for _rope in config.ropes:  # cosines and sines
        yield elementwise("angles", 4 * step.num_tokens * config.head_dim, launches=2)


def attention_works(
    config: ModelConfig,
    names: TensorNames,
    layer: LayerConfig,
    step: Step,
    needed: Step,
    num_processors: int,
) -> Iterator[Work]:
    """Yield the launches up to the output of attention."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    yield product("qkv", step.num_tokens, hidden, queries + 2 * keys, config.has_qkv_bias)
    if needed.num_tokens < step.num_tokens or layer.query_rope != layer.key_rope:
        yield from rope_works("rope of keys", layer, step.num_tokens, [keys], head_dim)
        yield from select_works(config, step, needed)
        yield from rope_works("rope of queries", layer, needed.num_tokens, [queries], head_dim)
    else:
        yield from rope_works("rope", layer, step.num_tokens, [queries, keys], head_dim)
    yield elementwise("write", 4 * step.num_tokens * keys)
    yield from scores_works(config, layer, needed, num_processors)
    yield product("output", needed.num_tokens, queries, hidden, config.has_output_bias)
    if names.attention_norm:
        yield norm("norm of outputs", needed.num_tokens, hidden)


def select_works(config: ModelConfig, step: Step, needed: Step) -> Iterator[Work]:
    """Yield the selections of sampled tokens: angles, queries and hidden states."""
    num_tokens = needed.num_tokens
    if num_tokens == step.num_tokens:
        return
    for _rope in config.ropes:
        yield elementwise("select", 4 * num_tokens * config.head_dim, launches=2)
    yield elementwise("select", 2 * num_tokens * config.num_heads * config.head_dim)
    yield elementwise("select", 2 * num_tokens * config.hidden_size)


def rope_works(
    name: str, layer: LayerConfig, num_tokens: int, sizes: Sequence[int], head_dim: int
) -> Iterator[Work]:
    """Yield the launches of RoPE, which reads cosines and sines and norms each head."""
    if layer.qk_norm is QkNorm.ALL_HEADS:
        for size in sizes:
            yield norm("norm of heads", num_tokens, size)
    weights = len(sizes) * head_dim if layer.qk_norm is QkNorm.HEAD else 0
    yield elementwise(name, 2 * num_tokens * (sum(sizes) + head_dim), weights)


def scores_works(
    config: ModelConfig, layer: LayerConfig, step: Step, num_processors: int
) -> Iterator[Work]:
    """Yield the launches of attention over the cache: two if programs share a context."""
    rows, head_dim = step.num_tokens * config.num_heads, config.head_dim
    first = step.context_len - step.num_new
    num_seen = [see(layer, position) for position in range(first, step.context_len)]
    num_slots = step.num_sequences * (num_seen[0] + step.num_new - 1)
    kv_bytes = num_slots * 2 * config.num_kv_heads * head_dim * NUMBER_BYTES
    flops = 4 * step.num_sequences * sum(num_seen) * config.num_heads * head_dim
    num_partials = rows * (head_dim + NUM_SUMS)
    outputs = rows * head_dim * NUMBER_BYTES
    tile_tokens, num_tiles = tiles(config, step)
    num_segments = count_segments(
        round_context(step.context_len), layer.window, layer.chunk, tile_tokens
    )
    if split_context(num_tiles, num_segments, num_partials, num_processors) is None:
        yield Work("attention", Kind.ATTENTION, 0, kv_bytes, 2 * outputs, flops)
        return
    partial_bytes = -(-num_seen[-1] // SEGMENT_KEYS) * num_partials * FLOAT_BYTES
    yield Work("attention", Kind.ATTENTION, 0, kv_bytes, outputs + partial_bytes, flops)
    yield Work("merge", Kind.ATTENTION, 0, 0, partial_bytes + outputs)


def tiles(config: ModelConfig, step: Step) -> tuple[int, int]:
    """Return the tokens of a tile, and the tiles of all heads."""
    gqa_group_size = config.num_heads // config.num_kv_heads
    tile_heads = min(gqa_group_size, NUM_ROWS)
    tile_tokens = NUM_ROWS // tile_heads
    head_tiles = config.num_kv_heads * -(-gqa_group_size // tile_heads)
    return tile_tokens, head_tiles * count_tiles(step.num_tokens, step.num_sequences, tile_tokens)


def see(layer: LayerConfig, position: int) -> int:
    """Return the number of slots that the token at this position attends to."""
    num_seen = position + 1 if layer.chunk is None else position % layer.chunk + 1
    return num_seen if layer.window is None else min(num_seen, layer.window)


def mlp_works(
    config: ModelConfig, names: TensorNames, layer: LayerConfig, step: Step, *, norms_next: bool
) -> Iterator[Work]:
    """Yield the launches from the sum with attention's output on."""
    tokens, hidden, size = step.num_tokens, config.hidden_size, layer.mlp_size
    yield add(tokens, hidden, has_norm=bool(names.mlp_norm))
    yield product("gate and up", tokens, hidden, 2 * size, config.has_mlp_bias)
    yield elementwise("gate", 3 * tokens * size)
    yield product("down", tokens, size, hidden, config.has_mlp_bias)
    if names.mlp_output_norm:
        yield norm("norm of outputs", tokens, hidden)
    yield add(tokens, hidden, has_norm=norms_next and bool(names.input_norm))


def output_works(config: ModelConfig, step: Step) -> Iterator[Work]:
    """Yield the launches from the last norm to the sampled tokens."""
    rows, vocab = step.num_sequences, config.vocab_size
    yield norm("norm", rows, config.hidden_size)
    yield product("head", rows, config.hidden_size, vocab, has_bias=False)
    yield elementwise("logits as float32", 3 * rows * vocab)
    num_changes = (config.logits_scale != 1.0) + 3 * (config.logits_softcap is not None)
    if num_changes:
        work = 4 * rows * vocab * num_changes
        yield elementwise("change logits", work, launches=num_changes)
    yield elementwise("peaks", 2 * rows * vocab)


def elementwise(kernel: str, numbers: int, weights: int = 0, launches: int = 1) -> Work:
    """Return the work of a kernel that reads and writes so many numbers."""
    weight_bytes, num_bytes = weights * NUMBER_BYTES, numbers * NUMBER_BYTES
    return Work(kernel, Kind.ELEMENTWISE, weight_bytes, 0, num_bytes, launches=launches)


def add(num_rows: int, size: int, *, has_norm: bool) -> Work:
    """Return the work of a sum, and of its norm if the same launch computes it."""
    if has_norm:
        return elementwise("add and norm", 4 * num_rows * size, size)
    return elementwise("add", 3 * num_rows * size)


def norm(kernel: str, num_rows: int, size: int) -> Work:
    return elementwise(kernel, 2 * num_rows * size, size)


def product(kernel: str, num_rows: int, size: int, num_outputs: int, has_bias: bool) -> Work:
    weights = (size + has_bias) * num_outputs
    activations = num_rows * (size + num_outputs)
    return Work(
        kernel,
        Kind.PRODUCT,
        weight_bytes=weights * NUMBER_BYTES,
        activation_bytes=activations * NUMBER_BYTES,
        flops=2 * num_rows * size * num_outputs,
    )
