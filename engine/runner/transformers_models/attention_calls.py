"""Calls of transformers' attention interface that a decoder makes in a pass, found without weights.

The decoder runs once on the meta device, where tensors have shapes but no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from baton.engine.runner.transformers_models.outline import UnsupportedModel

RECORDED = "baton-recorded"  # name of an implementation of attention
# Arguments that change nothing without an attention mask, cache or training.
IGNORED = frozenset(
    {
        *("dropout", "sliding_window", "position_ids", "cache_position", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("logits_to_keep", "layer_idx", "is_causal"),
    }
)
FAR = 1 << 20  # a distance that no window reaches


class AttentionCall(NamedTuple):
    """Attention of one layer as its module asks for it."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(slots=True)
class _Recording:
    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[Tensor, int | None]] = field(default_factory=list)  # with their windows

    def window_of(self, mask: Tensor | None) -> int | None:
        """Return the window of a mask that is one of those made for this pass."""
        if mask is None:
            return None
        for made, window in self.masks:
            if mask is made or mask._base is made:
                return window
        raise UnsupportedModel("its layers add numbers to the scores of attention, such as ALiBi")


_recording: ContextVar[_Recording] = ContextVar("_recording")


@contextmanager
def recorded_calls() -> Iterator[list[AttentionCall]]:
    """Record the calls of models whose implementation of attention is RECORDED."""
    recording = _Recording()
    token = _recording.set(recording)
    try:
        yield recording.calls
    finally:
        _recording.reset(token)


def _record(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Record a call. Shapes are [1, heads, tokens, head_dim]."""
    recording = _recording.get()
    for name, given in others.items():
        if given is not None and name not in IGNORED:
            raise UnsupportedModel(
                f"its attention takes {name!r}, which paged attention does not have"
            )
    if others.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedModel("its attention is not causal")
    if scaling is not None and not isinstance(scaling, int | float):
        raise UnsupportedModel("the scale of its attention is not a number")
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    window = recording.window_of(attention_mask)
    recording.calls.append(AttentionCall(*sizes, scale, window, softcap, s_aux is not None))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _make_mask(
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    **_: Any,
) -> Tensor:
    """Make a mask without numbers, and keep which window it has."""

    def sees(query: int, key: int) -> bool:
        seen = mask_function(0, 0, torch.tensor(query), torch.tensor(key))
        if seen.is_meta:
            raise UnsupportedModel("its attention has masks that are neither causal nor windows")
        return bool(seen)

    reach = FAR if local_size is None else local_size
    edges = {(0, 0): True, (0, 1): False, (reach - 1, 0): True, (2 * reach - 1, reach): True}
    if local_size is not None:
        edges[reach, 0] = False
    if any(sees(*edge) is not expected for edge, expected in edges.items()):
        raise UnsupportedModel("its attention has masks that are neither causal nor windows")
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    _recording.get().masks.append((mask, local_size))
    return mask


AttentionInterface.register(RECORDED, _record)
AttentionMaskInterface.register(RECORDED, _make_mask)
