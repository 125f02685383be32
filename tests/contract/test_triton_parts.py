"""Triton parts: where they are refused, and bits that do not depend on the batch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.engine.runner.kernels.choose import choose_parts
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.triton import availability
from baton.engine.runner.triton.availability import INTERPRETER_VARIABLE
from tests.support.attention_world import Part, Shape, World
from tests.support.triton_parts import require_triton, triton_attention, triton_ops

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_triton_kernels_without_the_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find_spec", lambda name: None)

    with pytest.raises(InvalidConfig, match=r"pip install 'baton\[gpu\]'"):
        choose_parts("triton", torch.float32, CPU)


def test_triton_kernels_on_a_cpu_without_the_interpreter_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_triton()
    monkeypatch.delenv(INTERPRETER_VARIABLE)

    with pytest.raises(InvalidConfig, match=f"--device cuda.*{INTERPRETER_VARIABLE}=1"):
        choose_parts("triton", torch.float32, CPU)


def test_triton_kernels_with_int8_activations_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="--activation-dtype int8 needs the native kernels"):
        choose_parts("triton", torch.bfloat16, CPU, int8_activations=True)


def test_triton_is_imported_only_if_it_is_chosen() -> None:
    program = (
        "import sys, torch; from baton.engine.runner.kernels.choose import choose_parts; "
        "choose_parts('torch', torch.float32, torch.device('cpu')); "
        "assert not [name for name in sys.modules if name.split('.')[0] == 'triton']"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_in_a_chunk_in_a_batch_and_alone(dtype: torch.dtype) -> None:
    # Tiles of 5 tokens: their boundaries differ between the passes. Blocks before windows are NaN.
    shape = Shape(num_heads=6, windows=(9, 20), softcap=30.0, has_sinks=True, dtype=dtype)
    world = World(shape, [Part(37, 1), Part(70, 1), Part(0, 13), Part(29, 12)], seed=6)
    together = world.attend(triton_attention)
    for layer, outputs in enumerate(together):
        assert torch.allclose(outputs.double(), world.expected(layer), atol=TOLERANCE[dtype])

    layout = world.layout()
    last = torch.from_numpy(layout.last_token_indices(np.arange(4)))
    for sequences in (np.arange(4), np.array([3]), np.array([2]), np.array([1])):
        layers = [world.attention(layer) for layer in range(2)]
        ends = layout.restrict_to_last_tokens(sequences)
        decodes = triton_attention(world.kv, layers).begin(ends)
        for layer, outputs in enumerate(together):
            tokens = last[torch.from_numpy(sequences)]
            assert torch.equal(decodes.attend(layer, world.queries[layer][tokens]), outputs[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_in_a_batch_and_alone(dtype: torch.dtype) -> None:
    ops, rows = triton_ops(), drawn(7, 130).to(dtype)
    norm, heads = Norm(drawn(1, 130)[0].to(dtype), 1e-6), rows[:, None, :]
    angles = drawn(7, 1, 130).to(dtype), drawn(7, 1, 130).to(dtype)

    normed, rotated = ops.rms_norm(rows, norm), ops.apply_rope(heads, norm, angles)

    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(normed[one], ops.rms_norm(rows[one], norm))
        cos, sin = (each[one] for each in angles)
        assert torch.equal(rotated[one], ops.apply_rope(heads[one], norm, (cos, sin)))
