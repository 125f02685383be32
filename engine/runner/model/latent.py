"""Multi-head latent attention (MLA) in absorbed form: attention over the latents themselves.

The scores of a head are products of its keys, which are projections of the latents. Instead of the
latents, the query is projected. Likewise, the sum of a head's values is the projection of a sum of
latents. So all heads share one key per token, whose leading numbers are the value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.runner.model.config import LatentConfig
from baton.engine.runner.model.linear import HeadLinears, Linear
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.model.rope import Angles


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """Weights of a layer that only latent attention has."""

    query: Linear | None  # from low-rank queries to those of all heads
    key: HeadLinears  # from unrotated queries into the latent space
    value: HeadLinears  # from the latent space to values


def split_latent(config: LatentConfig, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, latents and unrotated keys of [tokens, rows]."""
    num_others = config.rank + config.rope_dim
    sizes = projected.shape[1] - num_others, config.rank, config.rope_dim
    query, latent, key = projected.split(sizes, dim=1)
    return query, latent, key


def latent_key(ops: Ops, latent: Tensor, key: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
    """Return the keys that the cache holds, [tokens, 1, rank + rope_dim]."""
    if norm is not None:
        latent = ops.rms_norm(latent, norm)
    return torch.cat((latent[:, None], ops.apply_rope(key[:, None], None, angles)), dim=2)


def latent_query(
    config: LatentConfig,
    ops: Ops,
    weights: LatentProjections,
    query: Tensor,
    norm: Norm | None,
    angles: Angles,
) -> Tensor:
    """Return queries of the cached keys, [tokens, heads, rank + rope_dim]."""
    if weights.query is not None:
        query = weights.query(query if norm is None else ops.rms_norm(query, norm))
    sizes = config.nope_dim, config.rope_dim
    plain, rotated = query.view(len(query), -1, sum(sizes)).split(sizes, dim=2)
    return torch.cat((weights.key(plain), ops.apply_rope(rotated, None, angles)), dim=2)
