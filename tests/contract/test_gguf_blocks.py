"""Every type of GGUF tensors, dequantized: the same bits as by llama.cpp's own package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from baton.checkpoint.gguf.gguf_tensors import DECODERS, decode_blocks
from baton.checkpoint.gguf.header import BLOCK_TYPES, BlockType
from baton.checkpoint.quantized import Quantized, in_one_format, stacked
from baton.engine.runner.kernels.choose import choose_parts

QUANTIZED = [kind for kind in BLOCK_TYPES.values() if not kind.is_plain]
ROWS = 24


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_random_blocks_have_the_bits_of_the_reference(kind: BlockType) -> None:
    drawn = np.random.default_rng(3)
    rows = drawn.integers(0, 256, (ROWS, 6 * kind.num_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        rows[rows == 255] = 254  # as an exponent it means NaN, which llama.cpp ignores
    with np.errstate(all="ignore"):  # some random scales are infinite or NaN
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.name])

    found = decode_blocks(kind, torch.tensor(rows)).dequantize().numpy()

    is_nan = np.isnan(expected)
    assert (~is_nan).sum() > 0
    assert np.array_equal(np.isnan(found), is_nan)
    # MXFP4 has a negative zero, which llama.cpp makes positive: adding zero does, too.
    bits, expected_bits = ((each[~is_nan] + 0.0).view("u4") for each in (found, expected))
    assert np.array_equal(bits, expected_bits)


def drawn_matrix(name: str) -> Quantized:
    """Return 64 rows with six blocks of random bytes."""
    [kind] = [kind for kind in QUANTIZED if kind.name == name]
    rows = np.random.default_rng(3).integers(0, 256, (64, 6 * kind.num_bytes), dtype=np.uint8)
    return replace(decode_blocks(kind, torch.tensor(rows)), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("names", "max_bits"),
    [
        (["Q4_0"], 4.5),
        (["Q4_K"], 4.7),
        (["Q5_K"], 6.7),
        (["Q6_K"], 6.6),
        (["Q4_K", "Q6_K"], 7.2),
    ],
    ids=str,
)
def test_packed_matrices_have_the_numbers_of_the_file_in_few_bits(
    names: Sequence[str], max_bits: float
) -> None:
    matrix = stacked(in_one_format([drawn_matrix(name) for name in names]))
    packer = choose_parts(
        "native", torch.bfloat16, torch.device("cpu"), activation_dtype="int8"
    ).packer
    assert packer is not None

    packed = packer.pack(matrix.with_half_scales())

    assert 8 * len(packed.data) <= matrix.numbers.numel() * max_bits
    found = packer.packed_linear(packed, None).rows(torch.arange(len(matrix.numbers)))
    wanted = matrix.dequantize()
    is_finite = wanted.isfinite() & found.isfinite()  # joined, steps above 2047 overflow
    assert is_finite.float().mean() > 0.85
    assert torch.equal(found[is_finite], wanted[is_finite])


def test_every_quantized_type_has_a_decoder() -> None:
    assert {kind.name for kind in QUANTIZED} == DECODERS.keys()


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
def test_sizes_of_blocks_are_those_of_the_reference(kind: BlockType) -> None:
    name = gguf.GGMLQuantizationType[kind.name]

    assert gguf.GGML_QUANT_SIZES[name] == (kind.numbers, kind.num_bytes)
    assert BLOCK_TYPES[name.value] == kind
