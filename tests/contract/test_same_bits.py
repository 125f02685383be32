"""Batch invariance of the native kernels: a token's bits depend on its sequence alone.

They do not depend on the chunks of its prompt, on the other requests of a pass, or on whether the
token was generated or recomputed. So an answer that migrates to another node keeps its tokens,
even where two tokens are equally likely.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.runner.attention.byte_kv import quantize
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.native_attention import NativePagedAttention
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model.config import RopeConfig
from baton.engine.runner.model.pass_layout import PassLayout
from baton.engine.runner.model.rope import Rope
from baton.engine.runner.model_runner import TorchRunner
from tests.support.families import FAMILY_VARIANTS, STATE_VARIANTS
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.runner_drivers import Drive, Driver, RandomChunkDriver

pytestmark = [
    pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here"),
    pytest.mark.usefixtures("one_thread"),
]

GREEDY = SamplingParams(temperature=0.0, logprobs=3)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, logprobs=3)
# By the edges of blocks (16), of panels (64), and longer than both.
PROMPT_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 150)
NUM_BLOCKS = 200
KV_DTYPES = [torch.bfloat16, torch.int8, torch.float8_e4m3fn]

Cut = Callable[[int], int]  # from remaining tokens to tokens of the next pass


class Sequences:
    """Random keys, values and queries of some sequences, in one layer of a cache with garbage."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        seed: int,
        value_scale: float = 1.0,
        value_dim: int | None = None,
        *,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_kv_heads, gqa_group_size = heads
        num_heads = num_kv_heads * gqa_group_size
        self._block_size = block_size
        self._lengths = tuple(lengths)
        self._queries = [_drawn(generator, n, num_heads, head_dim) for n in lengths]
        self._keys = [_drawn(generator, n, num_kv_heads, head_dim) for n in lengths]
        values = [_drawn(generator, n, num_kv_heads, head_dim) for n in lengths]
        self._values = [value_scale * some for some in values]
        self._value_dim = value_dim
        self.sinks = 3 * torch.randn(num_heads, generator=generator)
        counts = [-(-n // block_size) for n in lengths]
        ids = torch.randperm(sum(counts), generator=generator).tolist()
        self._tables = [[ids.pop() for _ in range(count)] for count in counts]
        num_tensors = 2 if value_dim is None else 1
        shape = (sum(counts), 1, num_tensors, num_kv_heads, block_size, head_dim)
        garbage = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        self._garbage = quantize(garbage, kv_dtype)
        self._kv_scales = 0.5 + torch.rand(num_tensors, num_kv_heads, generator=generator)
        self._scale = head_dim**-0.5

    def attended(self, kernels: Kernels, rules: LayerAttention, cut: Cut) -> list[Tensor]:
        """Return the outputs of each sequence, computed in passes of the given size."""
        rules = replace(
            rules, scale=self._scale, value_dim=self._value_dim, kv_scales=self._kv_scales
        )
        attention = NativePagedAttention(kernels, self._garbage.clone(), [rules])
        computed = [0] * len(self._lengths)
        answers = [queries[..., : self._value_dim].clone() for queries in self._queries]
        while any(self._left(computed)):
            takes = [(i, cut(left)) for i, left in enumerate(self._left(computed)) if left]
            takes.sort(key=lambda take: take[1] != 1)  # single tokens first, as the layout requires
            parts = [(i, slice(computed[i], computed[i] + taken)) for i, taken in takes]
            flat = [
                torch.cat([tensors[i][part] for i, part in parts])
                for tensors in (self._queries, self._keys, self._values)
            ]
            running = attention.begin(self._layout(parts))
            running.write(0, *flat[1:])
            answer = running.attend(0, flat[0])
            for (i, part), chunk in zip(parts, answer.split([n for _, n in takes]), strict=True):
                answers[i][part] = chunk
                computed[i] = part.stop
        return answers

    def _left(self, computed: Sequence[int]) -> list[int]:
        return [length - done for length, done in zip(self._lengths, computed, strict=True)]

    def _layout(self, parts: Sequence[tuple[int, slice]]) -> PassLayout:
        widest = max(len(self._tables[i]) for i, _ in parts)
        places = [(i, p) for i, part in parts for p in range(part.start, part.stop)]
        size = self._block_size
        return PassLayout(
            num_queries=np.array([part.stop - part.start for _, part in parts]),
            context_lens=np.array([part.stop for _, part in parts]),
            block_tables=np.array(
                [[self._tables[i] + [10**6] * (widest - len(self._tables[i])) for i, _ in parts]]
            ),
            positions=np.array([p for _, p in places]),
            write_blocks=np.array([[self._tables[i][p // size] for i, p in places]]),
            write_offsets=np.array([p % size for _, p in places]),
        )


def _drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return (3 * torch.randn(*shape, generator=generator)).bfloat16()


def whole(left: int) -> int:
    return left


def one(left: int) -> int:
    return min(left, 1)


@pytest.mark.parametrize("kernels", kernels_by_variant().values(), ids=kernels_by_variant().keys())
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    heads=st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4, 7])),
    head_dim=st.sampled_from([8, 24, 64, 128]),
    block_size=st.sampled_from([1, 4, 16, 24, 48]),
    window=st.none() | st.integers(1, 150),
    chunk=st.none() | st.integers(1, 150),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    kv_dtype=st.sampled_from(KV_DTYPES),
    most=st.sampled_from([1, 2, 20, 100]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=num_examples(60))
def test_attention_is_bitwise_equal_for_any_chunks_and_any_batch(
    kernels: Kernels,
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    has_sinks: bool,
    kv_dtype: torch.dtype,
    most: int,
    seed: int,
) -> None:
    sequences = Sequences(lengths, heads, head_dim, block_size, seed, kv_dtype=kv_dtype)
    rules = LayerAttention(1.0, window, chunk, softcap, sequences.sinks if has_sinks else None)
    draw = random.Random(seed)

    at_once = sequences.attended(kernels, rules, whole)
    cut = sequences.attended(kernels, rules, lambda left: draw.randint(1, min(left, most)))

    assert all(map(torch.equal, at_once, cut))


@pytest.mark.parametrize("kernels", kernels_by_variant().values(), ids=kernels_by_variant().keys())
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (70, None), (300, None), (None, 90)])
@pytest.mark.parametrize(("heads", "is_capped"), [((2, 2), False), ((1, 7), False), ((1, 7), True)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_is_bitwise_equal_across_tile_boundaries(
    kernels: Kernels,
    window: int | None,
    chunk: int | None,
    heads: tuple[int, int],
    is_capped: bool,
    kv_dtype: torch.dtype,
) -> None:
    sequences = Sequences([530, 300, 257], heads, 64, 16, seed=1, kv_dtype=kv_dtype)
    rules = LayerAttention(1.0, window, chunk)
    if is_capped:
        rules = replace(rules, softcap=2.0, sinks=sequences.sinks)
    first, draw = 3 * [240], random.Random(0)

    at_once = sequences.attended(kernels, rules, whole)
    cut = sequences.attended(
        kernels, rules, lambda left: first.pop() if first else min(left, draw.choice([1, 1, 30]))
    )

    assert all(map(torch.equal, at_once, cut))


@pytest.mark.parametrize("kernels", kernels_by_variant().values(), ids=kernels_by_variant().keys())
@pytest.mark.parametrize("gqa_group_size", [1, 3, 16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_latent_attention_is_bitwise_equal_across_tile_boundaries(
    kernels: Kernels, gqa_group_size: int, kv_dtype: torch.dtype
) -> None:
    """A single sequence, too: threads share its heads."""
    lengths = [530, 300, 257]
    rules, draw = LayerAttention(1.0), random.Random(0)
    for some in (lengths, lengths[:1]):
        heads = (1, gqa_group_size)
        sequences = Sequences(some, heads, 96, 16, seed=1, value_dim=64, kv_dtype=kv_dtype)

        at_once = sequences.attended(kernels, rules, whole)
        cut = sequences.attended(
            kernels, rules, lambda left: 240 if left > 250 else min(left, draw.choice([1, 1, 30]))
        )

        assert all(map(torch.equal, at_once, cut))


@pytest.mark.parametrize("kernels", kernels_by_variant().values(), ids=kernels_by_variant().keys())
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_to_subnormal_values_is_bitwise_equal_for_any_chunks(
    kernels: Kernels, kv_dtype: torch.dtype
) -> None:
    """Some processors flush subnormals to zero, but only in some of their instructions."""
    sequences = Sequences([90], (2, 2), 64, 16, seed=2, value_scale=2.0**-127, kv_dtype=kv_dtype)

    rules = LayerAttention(1.0)

    at_once, cut = (sequences.attended(kernels, rules, cut) for cut in (whole, one))

    assert all(map(torch.equal, at_once, cut))


# Each computes something that the others do not.
MODELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("llama-bf16", {}),
    ("qwen3-bf16", {}),
    ("qwen2", {}),
    ("mistral-window", {}),
    ("llama-rope-dynamic", {}),
    ("llama-rope-yarn", {}),
    ("qwen3", {"quantize": "int8"}),
    ("llama", {"quantize": "int4", "activation_dtype": "bfloat16"}),
    ("llama", {"quantize": "int4", "activation_dtype": "int8"}),
    ("gemma2", {}),
    ("olmo3", {}),
    ("granite", {}),
    ("qwen2-moe", {}),
    ("llama4", {}),
    ("deepseek-v2-lite", {}),
    ("deepseek-v2", {"quantize": "int4", "activation_dtype": "bfloat16"}),
    ("deepseek-v3", {"quantize": "int8"}),
    ("gpt-oss", {}),
    ("qwen3-moe", {"quantize": "int4", "activation_dtype": "bfloat16"}),
    ("qwen3-moe", {"quantize": "int4", "activation_dtype": "int8"}),
    ("mixtral", {"quantize": "int8"}),
    ("qwen3-next", {}),
    ("lfm2", {}),
    ("falcon-h1", {"quantize": "int8"}),
    ("hunyuan", {}),
    ("cohere2", {}),
    ("qwen3.5", {"quantize": "int8"}),
    ("qwen3.5", {"kv_cache_dtype": "int8"}),
    ("gemma3", {"kv_cache_dtype": "int8"}),
    ("gemma3", {"kv_cache_dtype": "fp8"}),
    ("qwen3.5", {"kv_cache_dtype": "fp8"}),
    ("gemma4", {}),
    ("gemma3n", {"quantize": "int8"}),
    ("deepseek-v3", {"kv_cache_dtype": "int8"}),
)


@pytest.fixture(scope="module", params=MODELS, ids=lambda it: "-".join((it[0], *it[1].values())))
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TorchRunner]:
    name, options = request.param
    folder = tmp_path_factory.mktemp(name)
    variant = {**VARIANTS, **FAMILY_VARIANTS, **STATE_VARIANTS}[name]
    make_model_folder(folder, replace(variant, dtype="bfloat16"))
    config = RunnerConfig(
        str(folder), kernels="native", kv_cache_bytes=4 << 20, max_num_seqs=16, **options
    )
    with load_runner(config) as loaded:
        assert loaded.kv_memory.num_blocks >= NUM_BLOCKS
        yield loaded


def drives() -> list[Drive]:
    return [
        Drive(
            RequestId(f"r{i}"),
            prompt_of(length, seed=i),
            sampling=SEEDED if i % 2 else GREEDY,
            seed=i,
            num_tokens=24,
        )
        for i, length in enumerate(PROMPT_LENGTHS)
    ]


def test_tokens_and_logprobs_are_the_same_for_any_chunks_any_batch_and_when_recomputed(
    runner: TorchRunner,
) -> None:
    alone, together = drives(), drives()
    restless = RandomChunkDriver(
        runner, num_blocks=NUM_BLOCKS, block_size=16, seed=1, preempted_share=0.05
    )

    for drive in alone:
        Driver(runner, num_blocks=NUM_BLOCKS, block_size=16).run(drive)
    restless.run(*together)

    assert restless.num_preempted > len(together)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs == other.outputs
        assert one.logprobs == other.logprobs


def test_the_angles_of_dynamic_rope_do_not_depend_on_the_number_of_positions() -> None:
    scaling = RopeConfig(kind="dynamic", factor=4.0)
    rope = Rope(scaling, 64, 64, 128, torch.device("cpu"), torch.float32)
    positions, seen = torch.arange(700), torch.arange(1, 701)

    whole = rope.angles(positions, seen, 700)

    for start, count in ((0, 1), (127, 3), (300, 7), (500, 33), (699, 1)):
        part = slice(start, start + count)
        found = rope.angles(positions[part], seen[part], 700)
        assert torch.equal(torch.stack(found), torch.stack(whole)[:, part])
