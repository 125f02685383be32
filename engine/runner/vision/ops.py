"""Operations of a vision tower in plain torch, from which others are derived."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.model.rope import Angles, rotate
from baton.engine.runner.vision.config import TowerActivation
from baton.engine.runner.vision.weights import AnyNorm


class TorchVisionOps:
    """Operations on the patches of a picture. Each rounds to the dtype of its input."""

    def norm(self, hidden_states: Tensor, norm: AnyNorm) -> Tensor:
        """Norm of [patches, size]."""
        if isinstance(norm, LayerNorm):
            return norm(hidden_states)
        return Ops().rms_norm(hidden_states, norm)

    def activate(self, inputs: Tensor, activation: TowerActivation, *, is_gated: bool) -> Tensor:
        """Return a function of the inputs: of their first half, times the second, if gated.

        Can overwrite the inputs.
        """
        if is_gated:
            gate, factor = inputs.chunk(2, dim=-1)
            return self.activate(gate, activation, is_gated=False) * factor
        if activation is TowerActivation.SILU:
            return functional.silu(inputs)
        if activation is TowerActivation.QUICK_GELU:
            return inputs * torch.sigmoid(1.702 * inputs)
        is_exact = activation is TowerActivation.GELU
        return functional.gelu(inputs, approximate="none" if is_exact else "tanh")

    def add(self, hidden_states: Tensor, output: Tensor) -> Tensor:
        """Return the sum. Can overwrite `hidden_states`."""
        return hidden_states + output

    def attend(
        self, qkv: Tensor, num_heads: int, lens: Sequence[int], angles: Angles | None
    ) -> Tensor:
        """Attention of each patch to its window: [patches, 3 * size] → [patches, size].

        Queries, keys and values, head by head. `lens` are the patches of the windows.
        """
        heads = qkv.unflatten(1, (3 * num_heads, -1))
        if angles is not None:
            rotated = rotate(heads[:, : 2 * num_heads], *angles)
            heads = torch.cat((rotated, heads[:, 2 * num_heads :]), dim=1)
        return attend_in_windows(heads.unflatten(1, (3, num_heads)), lens)


def attend_in_windows(heads: Tensor, lens: Sequence[int]) -> Tensor:
    """[patches, 3, heads, head_dim] → [patches, size]. Windows of the same length are a batch."""
    outputs, first = [], 0
    for num_patches, windows in groupby(lens):
        count = len(list(windows))
        part = heads[first : first + count * num_patches]
        query, key, value = part.unflatten(0, (count, num_patches)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1))
        first += len(part)
    return torch.cat(outputs)
