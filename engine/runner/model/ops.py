"""Operations of a decoder: the Protocol of their implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.model.config import Activation
from baton.engine.runner.model.linear import ExpertChoice, HeadLinears, Linear, Moe, Router
from baton.engine.runner.model.rank_group import RankGroup
from baton.engine.runner.model.rope import Angles


class Peaks(NamedTuple):
    """Argmax and finiteness of each row of logits."""

    token_ids: Tensor  # argmax, the first of equal values; undefined in a row with a NaN
    are_finite: Tensor  # booleans: all logits of the row are finite


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm. With `rounds_once` the weight is float32, and only the product is rounded."""

    weight: Tensor
    epsilon: float
    rounds_once: bool = False
    group: RankGroup | None = None  # of ranks that have as many numbers of each token


@dataclass(frozen=True, slots=True)
class MlpGate:
    """Activation of an MLP. `alpha` and `limit` belong to CLAMPED_SWIGLU."""

    activation: Activation = Activation.SILU
    alpha: float = 0.0
    limit: float = 0.0


class Ops(Protocol):
    """Operations of a decoder. Each rounds to the dtype of its input where torch does."""

    copies_weights: bool  # `linear` copies the weight, so that it can be a mapped file
    keeps_quantized: bool  # quantized matrices are multiplied as they are

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        """Make a linear layer. It owns the tensors from then on, and can keep or copy them."""
        ...

    def head_linears(self, weights: Tensor) -> HeadLinears:
        """Make a linear layer for each head from [heads, rows, columns]."""
        ...

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        """RMS norm of [tokens, size]."""
        ...

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        """RoPE of [tokens, heads, head_dim]. If `norm` is given, each head is RMS-normed first."""
        ...

    def apply_ropes(
        self, heads: tuple[Tensor, Tensor], norms: tuple[Norm | None, Norm | None], angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """Return what `apply_rope` does for queries and keys, which have the same angles."""
        ...

    def apply_gate(self, gate_up: Tensor, gate: MlpGate) -> Tensor:
        """[tokens, 2 * size] → [tokens, size]: function of the first half times the second.

        Without a gate it is the function of [tokens, size].
        """
        ...

    def multiply_sigmoid(self, hidden_states: Tensor, gates: Tensor) -> Tensor:
        """Return [tokens, size] times the sigmoid of its gates, or of one gate per token.

        Can overwrite `hidden_states`.
        """
        ...

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        """Return `hidden_states` + `output` * `scale`. Can overwrite `hidden_states`."""
        ...

    def add_and_norm(
        self, hidden_states: Tensor, output: Tensor, scale: float, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """Return what `add` does, and its RMS norm. Can overwrite `hidden_states`."""
        ...

    def route(self, hidden_states: Tensor, router: Router) -> ExpertChoice:
        """Choose the experts of each token. A token's choice depends only on the token."""
        ...

    def mix_experts(
        self, moe: Moe, gate: MlpGate, hidden_states: Tensor, routing: ExpertChoice
    ) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, [tokens, hidden_size]."""
        ...

    def find_peaks(self, logits: Tensor) -> Peaks:
        """Return argmax and finiteness of each row of [rows, vocab_size] in float32."""
        ...
