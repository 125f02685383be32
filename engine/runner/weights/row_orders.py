"""Order of the rows of a layer's joined matrices, which can differ from that of the files."""

from __future__ import annotations

from baton.engine.runner.model.config import LatentConfig, ModelConfig
from baton.engine.runner.model.rope import head_order, repeat_order


def joined_order(config: ModelConfig) -> list[int] | None:
    """Return the order of the rows of queries and keys; None: that of the files."""
    order = head_order(config)
    if config.has_output_gate:
        return _gated_order(config, order)
    num_heads = config.num_heads + config.num_kv_heads
    return None if order is None else repeat_order(order, num_heads)


def _gated_order(config: ModelConfig, order: list[int] | None) -> list[int]:
    """Return the order of rows of queries, keys, values and gates.

    A query's rows are stored before those of its gate, head by head.
    """
    num_heads, head_dim = config.num_heads, config.head_dim
    plain = list(range(head_dim))
    keys = repeat_order(order or plain, config.num_kv_heads)
    stored = [2 * head_dim * head for head in range(num_heads)]
    first_key, num_keys = 2 * head_dim * num_heads, config.num_kv_heads * head_dim
    return [
        *(start + dimension for start in stored for dimension in order or plain),
        *(first_key + row for row in keys),
        *(first_key + num_keys + row for row in range(num_keys)),
        *(start + head_dim + dimension for start in stored for dimension in plain),
    ]


def latent_orders(latent: LatentConfig, config: ModelConfig) -> tuple[list[int], list[int]]:
    """Return the orders of the rows of all queries, and of a latent with its rotated key."""
    rope_order = head_order(config) or range(latent.rope_dim)
    head = [*range(latent.nope_dim), *(latent.nope_dim + at for at in rope_order)]
    key_order = [*range(latent.rank), *(latent.rank + at for at in rope_order)]
    return repeat_order(head, config.num_heads), key_order
