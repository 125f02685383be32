"""Baton's paged attention as an implementation of transformers' attention interface.

The interface is a global table of functions, so a pass is found by a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from baton.engine.runner.device.fenced_hook import FencedHook
from baton.engine.runner.model.mixers import AttentionPass

PAGED = "baton-paged"  # name of the implementation


class LayerCalls(Protocol):
    """Attention of a pass, called once for each layer, in order."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output of the next layer, [tokens, heads, head_dim], like all arguments."""
        ...


class PagedCalls:
    """Writes keys and values into the blocks of the KV cache, and attends to them there."""

    def __init__(self, attention: AttentionPass, hook: FencedHook | None) -> None:
        self._attention = attention
        self._hook = hook
        self._layer = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer, self._layer = self._layer, self._layer + 1
        self._attention.write(layer, key, value)
        attended = self._attention.attend(layer, query)
        if self._hook is not None:
            self._hook.layer_done(layer)
        return attended


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
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_mask: None, **_: Any
) -> tuple[Tensor, None]:
    """[1, heads, tokens, head_dim] → [1, tokens, heads, head_dim].

    Scales and windows are those that the layer gave when its calls were recorded.
    """
    by_token = (each[0].transpose(0, 1) for each in (query, key, value))
    return _calls.get().attend(*by_token)[None], None


AttentionInterface.register(PAGED, _attend)
