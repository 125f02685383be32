"""Linear layers and embeddings of transformers' modules, replaced by those of Baton's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D  # a linear layer of GPT-2

from baton.engine.runner.device.host_memory import HeapTrimmer
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model_info import LoadProgress, LoadProgressCallback
from baton.engine.runner.weights.tensor_loading import (
    QUANTIZERS,
    SENSITIVE_QUANTIZERS,
    LoadTarget,
)


class KernelLinear(nn.Module):
    """Linear layer that a kernel computes. `weight` has its dtype alone."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.linear(rows).view(*hidden_states.shape[:-1], -1)


class KernelEmbedding(KernelLinear):
    """Embedding table that shares its matrix with the head."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.linear.rows(token_ids.reshape(-1)).view(*token_ids.shape, -1)


def replace_modules(
    model: Any, target: LoadTarget, on_progress: LoadProgressCallback | None
) -> tuple[int, int]:
    """Replace linear layers. Returns how many were replaced, and how many there were."""
    found = list(_linear_places(model))
    if target.parts.packer is None and target.quantize == "none":
        return 0, len(found)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    total, done, num_replaced, trimmer = _num_bytes(model), 0, 0, HeapTrimmer()
    for parent, name in found:
        linear = parent._modules[name]
        assert isinstance(linear, nn.Linear | Conv1D)
        if linear.weight.dtype is not target.dtype:
            continue
        is_head = linear is head
        replaced = KernelLinear(_pack(linear, target, is_sensitive=is_head), target.dtype)
        if is_head and type(embedding) is nn.Embedding and linear.weight is embedding.weight:
            model.set_input_embeddings(KernelEmbedding(replaced.linear, target.dtype))
        parent._modules[name] = replaced
        num_replaced += 1
        done += linear.weight.nbytes
        trimmer.count(linear.weight.nbytes)
        if on_progress is not None:
            on_progress(LoadProgress(done, total))
    return num_replaced, len(found)


def copy_tensors(model: nn.Module, device: torch.device) -> None:
    """Move what was not replaced out of mapped files, one tensor after the other."""
    for each in (*model.parameters(), *model.buffers()):
        each.data = each.data.to(device, copy=True)


def _linear_places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield where the linear layers are. Those of subclasses compute more than a product."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) in (nn.Linear, Conv1D):
                yield parent, name


def _pack(linear: nn.Linear | Conv1D, target: LoadTarget, *, is_sensitive: bool) -> Linear:
    quantizers = SENSITIVE_QUANTIZERS if is_sensitive else QUANTIZERS
    quantize = quantizers[target.quantize]
    weight, bias = linear.weight.detach().to(target.device), linear._parameters["bias"]
    if isinstance(linear, Conv1D):
        weight = weight.T.contiguous()
    if bias is not None:
        bias = bias.detach().to(target.device, copy=True)  # out of the file
    return target.parts.ops.linear(weight if quantize is None else quantize(weight), bias)


def _num_bytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())
