"""Base class of the rules of recurrent layers, which each have a module and a line in `table.py`.

A layer projects its inputs, convolves some of the projected numbers over the tokens (its channels)
and applies its rule to them and to its state. The packing of states, snapshots and hand-offs depend
only on the state's shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm

Rows = Sequence[int]


class RuleTensors(Protocol):
    """Tensors of a layer besides projections, by the names that its rule gives them."""

    def vector(self, name: str, *shape: int) -> Tensor:
        """Load a small tensor in float32."""
        ...

    def gated_norm(self, size: int) -> Norm: ...


@dataclass(frozen=True, slots=True)
class RecurrentRule(ABC):
    """Weights of a recurrent layer between its projections, and the mathematics in torch."""

    kernel: ClassVar[str]  # the native one
    kernel_fields: ClassVar[tuple[str, ...]] = ()  # that this kernel reads, besides `conv`
    has_triton_kernels: ClassVar[bool] = False  # else torch computes the layer on GPUs
    stored_conv: ClassVar[str] = "conv1d"  # name of the convolution in the layer's module

    gates: Linear
    conv: Tensor  # [conv_size, channels] in float32, the oldest token first

    @staticmethod
    @abstractmethod
    def stored_rows(config: RecurrentConfig) -> tuple[Rows, Rows]:
        """Return the stored rows of the first projection, and those of `gates`, in Baton's order.

        Either both are rows of the same stored matrix, or each of its own.
        """

    @classmethod
    def load(cls, config: RecurrentConfig, gates: Linear, tensors: RuleTensors) -> Self:
        return cls(gates, cls.load_conv(config, tensors))

    @classmethod
    def load_conv(cls, config: RecurrentConfig, tensors: RuleTensors) -> Tensor:
        shape = config.num_channels, 1, config.conv_size
        return tensors.vector(f"{cls.stored_conv}.weight", *shape)[:, 0].T.contiguous()

    @abstractmethod
    def channels(self, config: RecurrentConfig, projected: Tensor) -> Tensor:
        """Return what is convolved, [tokens, channels]."""

    def convolve(self, inputs: Tensor) -> Tensor:
        """Convolve [sequences, conv_size - 1 + tokens, channels]. The result is float32."""
        num_tokens = inputs.shape[1] - len(self.conv) + 1
        total = torch.zeros(1, device=inputs.device)
        for tap, weight in enumerate(self.conv.float()):
            total = total + weight * inputs[:, tap : tap + num_tokens].float()
        return total

    @abstractmethod
    def apply(
        self, config: RecurrentConfig, mixed: Tensor, gates: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, [sequences, tokens, values] in float32, and the new state.

        `mixed` is the output of the convolution.
        """

    def finish(self, config: RecurrentConfig, output: Tensor, projected: Tensor) -> Tensor:
        """Return the layer's output for that of all tokens, [tokens, values], in float32."""
        return output
