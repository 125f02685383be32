"""A model of transformers, split where hidden states become logits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from baton.engine.runner.transformers_models.outline import UnsupportedModel


@dataclass(frozen=True, slots=True)
class SplitModel:
    """Decoder and head. Scales and caps of logits are in the forward pass of the whole model.

    The head is therefore a copy of the whole in which a module that returns its input replaces the
    decoder. Both share their weights.
    """

    whole: Any
    decoder: Any
    head: Any

    def hidden_states(self, token_ids: Tensor, positions: Tensor, **others: Any) -> Any:
        """[tokens] → output of the decoder, whose hidden states are [1, tokens, hidden_size]."""
        return self.decoder(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **others
        )

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size]."""
        logits: Tensor = self.head(inputs_embeds=hidden_states[None], use_cache=False).logits
        return logits[0]


class _GivenStates(nn.Module):
    """Returns hidden states that are given as embeddings of the input."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_others: Any) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


def decoder_of(whole: Any) -> Any:
    """Return the module between token ids and the head."""
    return whole.base_model.get_decoder()


def split_model(whole: Any, output: type) -> SplitModel:
    """Split a model whose decoder returns this class of outputs. Raises UnsupportedModel."""
    decoder = decoder_of(whole)
    path = next((name for name, module in whole.named_modules() if module is decoder), "")
    if not path or "last_hidden_state" not in getattr(output, "__dataclass_fields__", ()):
        raise UnsupportedModel("its decoder is not a module apart from its head")
    return SplitModel(whole, decoder, _replaced(whole, path.split("."), _GivenStates(output)))


def _replaced(module: nn.Module, path: Sequence[str], replacement: nn.Module) -> nn.Module:
    """Return a copy of a module, with the same parts but one."""
    copied, (name, *rest) = copy.copy(module), path
    part = module._modules[name]
    assert part is not None
    copied._modules = {
        **module._modules,
        name: _replaced(part, rest, replacement) if rest else replacement,
    }
    return copied
