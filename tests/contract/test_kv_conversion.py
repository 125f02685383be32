"""Conversion of KV blocks: every token's numbers reach its slot, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.runner.attention.int8_kv import dequantize, quantize
from baton.engine.runner.attention.kv_conversion import write_converted
from tests.support.hypothesis_profiles import num_examples


@given(
    sizes=st.tuples(st.sampled_from([1, 3, 16, 32]), st.sampled_from([1, 4, 16, 32, 600])),
    num_tokens=st.integers(1, 150),
    first_token=st.integers(0, 40),
    is_int8=st.booleans(),
)
@settings(max_examples=num_examples(40), deadline=None)
def test_each_token_is_written_into_its_slot(
    sizes: tuple[int, int], num_tokens: int, first_token: int, is_int8: bool
) -> None:
    source, target = sizes
    first_token = min(first_token, source - 1)
    num_staged = -(-(first_token + num_tokens) // source)
    staged = torch.randn(num_staged, 2, 2, 1, source, 8).bfloat16()
    num_blocks = -(-num_tokens // target)
    kv = torch.zeros(num_blocks + 2, 2, 2, 1, target, 8, dtype=torch.bfloat16)
    kv = quantize(kv) if is_int8 else kv
    block_ids = torch.randperm(len(kv))[:num_blocks].tolist()

    write_converted(staged, kv, torch.tensor(block_ids), first_token)

    for token in range(num_tokens):
        place = first_token + token
        sent = staged[place // source, :, :, :, place % source]
        kept = kv[block_ids[token // target], :, :, :, token % target]
        assert torch.equal(kept, quantize(sent) if is_int8 else sent)
    others = [block for block in range(len(kv)) if block not in block_ids]
    assert not dequantize(kv[others], torch.float32).any() if is_int8 else not kv[others].any()


@pytest.mark.parametrize("scale", [1e-38, 1.0, 3e38])
def test_the_quantization_error_is_at_most_half_of_the_scale(scale: float) -> None:
    numbers = scale * (2 * torch.rand(50, 64, generator=torch.Generator().manual_seed(1)) - 1)
    numbers = numbers.bfloat16().float()

    found = dequantize(quantize(numbers), torch.float64)

    highest = numbers.double().abs().amax(dim=1, keepdim=True)
    assert ((found - numbers).abs() <= highest / 127 / 2 * (1 + 2**-6)).all()
