"""Forward pass of a decoder on transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.runner.device.fenced_hook import FencedHook
from baton.engine.runner.model.decoder import GivenRows
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.transformers_models.config import TransformersConfig
from baton.engine.runner.transformers_models.paged_interface import (
    LayerCalls,
    PagedCalls,
    attention_by,
)
from baton.engine.runner.transformers_models.refusals import UnsupportedModel
from baton.engine.runner.transformers_models.split_model import SplitModel

# Relative, of states whose experts were computed for another number of tokens. In half precision
# rounding grows over many layers, but less than a state would make of it.
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.1


@dataclass(eq=False)  # not frozen: `benchmarks/engine` wraps its methods
class TransformersDecoder:
    """Implements `CausalLm`. All layers compute all tokens."""

    config: TransformersConfig
    ops: Ops
    model: SplitModel
    waits_for_experts: bool = True
    classifier: None = None

    def forward(
        self,
        token_ids: Tensor,
        forward_pass: ForwardPass,
        hook: FencedHook | None,
        ends: Ends | None = None,
        given: GivenRows | None = None,
    ) -> Tensor:
        assert forward_pass.positions is not None
        calls = PagedCalls(forward_pass.attention, self.config.head_dims, hook)
        hidden_states = self._compute(token_ids, forward_pass.positions, calls)
        return hidden_states if ends is None else hidden_states[ends.indices]

    def logits(self, hidden_states: Tensor, dst: Tensor | None = None) -> Tensor:
        logits = self.model.logits(hidden_states)
        return logits.float() if dst is None else dst.copy_(logits)

    def check_isolation(self, device: torch.device) -> Sequence[Tensor | None]:
        """Check that without attention a token depends on nothing but itself and its position.

        Returns the sinks of each layer. Raises UnsupportedModel: a layer has a state, or positions
        are ignored.
        """
        before, after = _Unmixed(), _Unmixed()
        ids = torch.tensor([1, 2, 3], device=device) % self.config.vocab_size
        positions = torch.tensor([0, 2, 1], device=device) % self.config.max_position_embeddings
        first = self._compute(ids[:2], positions[:2], before)[1]
        second = self._compute(ids[1:], positions[1:], after)[0]
        seen = [first, *(each[1] for each in before.seen)]
        again = [second, *(each[0] for each in after.seen)]
        tolerance = TOLERANCE if first.dtype is torch.float32 else HALF_TOLERANCE
        for one, other in zip(seen, again, strict=True):
            if (one - other).float().norm() > tolerance * one.float().norm():
                raise UnsupportedModel(
                    "its tokens depend on each other outside of attention, or not on their "
                    "positions: it keeps a state besides keys and values"
                )
        return before.sinks

    def _compute(self, token_ids: Tensor, positions: Tensor, calls: LayerCalls) -> Tensor:
        with attention_by(calls):
            output = self.model.hidden_states(token_ids, positions)
        hidden_states: Tensor = output.last_hidden_state[0]
        return hidden_states


@dataclass(slots=True)
class _Unmixed:
    """Implements `LayerCalls`: each token sees itself alone."""

    seen: list[Tensor] = field(default_factory=list)
    sinks: list[Tensor | None] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        self.seen += query, key, value
        self.sinks.append(None if sinks is None else sinks.detach().float())
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
