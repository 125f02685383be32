"""Baton's paged attention as an implementation of transformers' attention interface.

The interface is a global table of functions, so a pass is found by a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from baton.engine.runner.device.device import FencedHook
from baton.engine.runner.model.mixers import AttentionPass

PAGED = "baton-paged"  # name of the implementation


class LayerCalls(Protocol):
    """Attention of a pass, called once for each layer, in order."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the output of the next layer, [tokens, heads, head_dim], like the first arguments.

        `sinks` are logits of slots without values, one for each head.
        """
        ...


class PagedCalls:
    """Writes keys and values into the blocks of the KV cache, and attends to them there.

    Where keys and values have unlike sizes, zeros fill the smaller ones up. The attention has the
    sinks from the start.
    """

    def __init__(
        self, attention: AttentionPass, head_dims: Sequence[int], hook: FencedHook | None
    ) -> None:
        """`head_dims` are those of the layers in the KV cache."""
        self._attention = attention
        self._head_dims = enumerate(head_dims)
        self._hook = hook

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        layer, dim = next(self._head_dims)
        self._attention.write(layer, _padded(key, dim), _padded(value, dim))
        attended = self._attention.attend(layer, _padded(query, dim))
        if self._hook is not None:
            self._hook.layer_done(layer)
        return attended[..., : value.shape[2]]


def _padded(heads: Tensor, dim: int) -> Tensor:
    size = heads.shape[2]
    return heads if size == dim else functional.pad(heads, (0, dim - size))


_calls: ContextVar[LayerCalls] = ContextVar("_calls")


@contextmanager
def attention_by(calls: LayerCalls) -> Iterator[None]:
    """Let models whose implementation of attention is PAGED call these functions."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_mask: None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, heads, tokens, head_dim] → [1, tokens, heads, head_dim].

    Scales and windows are those that the layer gave when its calls were recorded.
    """
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return _calls.get().attend(query, key, value, s_aux)[None], None


AttentionInterface.register(PAGED, _attend)
