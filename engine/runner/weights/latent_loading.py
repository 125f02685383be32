"""Loads the attention of a layer with latent attention (MLA)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from baton.engine.runner.model.config import LatentConfig
from baton.engine.runner.model.layer_weights import LatentProjections
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.weights.layer_tensors import LayerTensors
from baton.engine.runner.weights.loader import Stack
from baton.engine.runner.weights.row_orders import latent_orders

EPSILON = 1e-6  # for norms of low-rank queries and latents, whatever the others have


class LatentAttention(NamedTuple):
    down: Linear  # the stacked first projections
    query_norm: Norm | None
    key_norm: Norm
    projections: LatentProjections


def load_latent(config: LatentConfig, tensors: LayerTensors) -> LatentAttention:
    """Load it, all but the output projection."""
    names, rank, hidden = tensors.names.latent, config.query_rank, tensors.config.hidden_size
    order, key_order = latent_orders(config, tensors.config)
    query, query_norm, query_up = names.query, None, None
    if rank is not None:
        query_norm = _norm(tensors, names.query_norm, rank)
        up = Stack([names.query_up], [len(order)], rank, place=tensors.place("query_up"))
        query_up = tensors.linear(replace(up, order=order))
        query, order = names.query_down, list(range(rank))
    rows, order = [len(order), len(key_order)], [*order, *(len(order) + at for at in key_order)]
    down = Stack([query, names.key_down], rows, hidden, place=tensors.place("qkv"))
    return LatentAttention(
        tensors.linear(replace(down, order=order)),
        query_norm,
        _norm(tensors, names.key_norm, config.rank),
        _projections(config, tensors, query_up),
    )


def _projections(
    config: LatentConfig, tensors: LayerTensors, query: Linear | None
) -> LatentProjections:
    """Split the matrix that would compute keys and values of all heads from the latents."""
    name, num_heads = tensors.names.latent.key_up, tensors.config.num_heads
    sizes, loader = (config.nope_dim, config.value_dim), tensors.loader
    stack = Stack([name], [num_heads * sum(sizes)], config.rank, place=tensors.place("key"))
    by_head = loader.matrix(tensors.in_layer(stack)).unflatten(0, (num_heads, -1))
    key, value = by_head.split(sizes, dim=1)
    return LatentProjections(query, loader.head_linears(key.mT), loader.head_linears(value))


def _norm(tensors: LayerTensors, name: str, size: int) -> Norm:
    return replace(tensors.norm(name, size), epsilon=EPSILON)
