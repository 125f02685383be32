"""Conversion of KV blocks: every token's numbers reach its slot, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.runner.attention.byte_kv import dequantize, quantize
from baton.engine.runner.attention.kv_blocks import write_converted
from tests.support.attention_world import bits
from tests.support.hypothesis_profiles import num_examples


@given(
    sizes=st.tuples(st.sampled_from([1, 3, 16, 32]), st.sampled_from([1, 4, 16, 32, 600])),
    num_tokens=st.integers(1, 150),
    first_token=st.integers(0, 40),
    num_layers=st.sampled_from([(2, 2), (2, 3), (3, 2)]),
    kv_dtype=st.sampled_from([torch.bfloat16, torch.int8, torch.float8_e4m3fn]),
)
@settings(max_examples=num_examples(40), deadline=None)
def test_each_token_is_written_into_its_slot(
    sizes: tuple[int, int],
    num_tokens: int,
    first_token: int,
    num_layers: tuple[int, int],
    kv_dtype: torch.dtype,
) -> None:
    source, target = sizes
    num_sent, num_kept = num_layers  # a draft head has layers after those of the model
    first_token = min(first_token, source - 1)
    num_staged = -(-(first_token + num_tokens) // source)
    staged = torch.randn(num_staged, num_sent, 2, 1, source, 8).bfloat16()
    num_blocks = -(-num_tokens // target)
    kv = torch.zeros(num_blocks + 2, num_kept, 2, 1, target, 8, dtype=torch.bfloat16)
    kv = quantize(kv, kv_dtype)
    kv[:, num_sent:] = 1  # of other requests
    scales = torch.rand(num_kept, 2, 1, 1) + 0.5 if kv_dtype is torch.float8_e4m3fn else None
    block_ids = torch.randperm(len(kv))[:num_blocks].tolist()

    write_converted(staged, kv, torch.tensor(block_ids), first_token, scales)

    for token in range(num_tokens):
        place = first_token + token
        sent = staged[place // source, :num_kept, :, :, place % source]
        kept = kv[block_ids[token // target], :num_sent, :, :, token % target]
        own = None if scales is None else scales[:num_sent]
        assert torch.equal(bits(kept), bits(quantize(sent, kv_dtype, own)))
    others = [block for block in range(len(kv)) if block not in block_ids]
    assert not dequantize(kv[others, :num_sent], torch.float32).any()
    assert not dequantize(kv[block_ids, num_sent:], torch.float32).any()
    assert bool((kv[others, num_sent:] == 1).all())


@pytest.mark.parametrize("scale", [1e-38, 1.0, 3e38])
def test_the_quantization_error_is_at_most_half_of_the_scale(scale: float) -> None:
    numbers = scale * (2 * torch.rand(50, 64, generator=torch.Generator().manual_seed(1)) - 1)
    numbers = numbers.bfloat16().float()

    found = dequantize(quantize(numbers, torch.int8), torch.float64)

    highest = numbers.double().abs().amax(dim=1, keepdim=True)
    assert ((found - numbers).abs() <= highest / 127 / 2 * (1 + 2**-6)).all()
