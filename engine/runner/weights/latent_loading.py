"""Loads the attention of a layer with latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.runner.model.config import LatentConfig
from baton.engine.runner.model.layer_weights import LatentProjections
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.weights.row_orders import latent_orders
from baton.engine.runner.weights.tensor_loading import TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap

EPSILON = 1e-6  # for norms of low-rank queries and latents, whatever the others have


class LatentLoader:
    """Loads one layer."""

    def __init__(
        self, config: LatentConfig, tensors: TensorMap, loader: TensorLoader, index: int
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._names = tensors.names.latent
        self._loader = loader
        self._index = index
        self._head_order, self._key_order = latent_orders(config, tensors.config)

    def load(self) -> tuple[Linear, Norm | None, Norm, LatentProjections]:
        """Return the stacked first projections, their two norms and the other projections."""
        names, rank = self._names, self._config.query_rank
        if rank is None:
            query, order, query_norm, query_up = names.query, self._head_order, None, None
        else:
            query, order = names.query_down, list(range(rank))
            query_norm = self._norm(names.query_norm)
            query_up = self._linear([names.query_up], self._head_order)
        key_order = [len(order) + at for at in self._key_order]
        down = self._linear([query, names.key_down], [*order, *key_order])
        return down, query_norm, self._norm(names.key_norm), self._projections(query_up)

    def _projections(self, query: Linear | None) -> LatentProjections:
        """Split the matrix that would compute keys and values of all heads from the latents."""
        [name] = self._tensors.in_layers(self._index, [self._names.key_up])
        by_head = self._loader.plain_matrix(name).unflatten(0, (self._tensors.config.num_heads, -1))
        key, value = by_head.split((self._config.nope_dim, self._config.value_dim), dim=1)
        return LatentProjections(
            query, self._loader.head_linears(key.mT), self._loader.head_linears(value)
        )

    def _linear(self, names: Sequence[str], order: Sequence[int]) -> Linear:
        return self._loader.linear(self._tensors.in_layers(self._index, names), False, order)

    def _norm(self, name: str) -> Norm:
        return replace(
            self._loader.norm(self._tensors.in_layer(self._index, name)), epsilon=EPSILON
        )
