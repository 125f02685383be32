"""KV groups: the layers of a model, grouped by how long their keys and values are needed.

All layers of a group share one block table. A block has the same number of places in each group,
so that blocks of all groups have one size and come from one pool: a model with both windows and
full attention cannot fragment it. vLLM's hybrid KV cache does the same. Layers with larger keys and
values than others take several places each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.errors import InvalidConfig, require_setting
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.kv_transfer.layout import MemoryKind

# Share of places for layers that do not exist: a larger block has fewer tables.
MAX_WASTE = 0.1
# What such places cost in groups that forget tokens, relative to those that keep all of them.
FORGETTING_COST = 0.25
GROUP_COST = 0.02  # of a block table more, relative to as many places as all layers need
# Share of its places that a layer may leave empty.
MAX_PADDING = 0.05
MAX_PLACES = 16  # of the smallest layer


class KvHeads(NamedTuple):
    """Keys of a layer, and its values, for one token."""

    num: int
    dim: int

    @property
    def size(self) -> int:
        return self.num * self.dim


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """Keys and values that a layer needs. By default those of all tokens."""

    window: int | None = None  # tokens that a token attends to, itself included
    chunk: int | None = None  # tokens attend only within their own chunk of this size
    heads: KvHeads | None = None  # None: as all layers of the model have them

    def num_unseen(self, num_tokens: int) -> int:
        """Return the leading tokens that no token from position `num_tokens` on attends to."""
        if self.window is not None:
            return max(0, num_tokens - self.window + 1)
        if self.chunk is not None:
            return num_tokens // self.chunk * self.chunk
        return 0

    @property
    def forgets(self) -> bool:
        """Return whether tokens become invisible while a request runs."""
        return self.window is not None or self.chunk is not None

    def __str__(self) -> str:
        if self.window is not None:
            return f"window {self.window}"
        return "full" if self.chunk is None else f"chunk {self.chunk}"


FULL = KvCacheSpec()


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one spec, in the order of their places in a block."""

    spec: KvCacheSpec = FULL
    layers: tuple[int, ...] = ()
    layer_places: int = 1  # that a layer takes, one after the other

    @property
    def num_places(self) -> int:
        return len(self.layers) * self.layer_places


ONE_GROUP = (KvGroup(),)

# A pass reads one copy of a recurrent state and writes another one, so that a failed pass can be
# repeated, and one more for each draft. The first pass after a prefix hit reads another one: the
# snapshot that was hit.
NUM_STATE_COPIES = 2


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Memory of a request by kind: a block table per KV group, and perhaps a recurrent state.

    The state takes the same number of blocks however long the request is. With two groups and
    states of 3 blocks, a request with 5 blocks of tokens takes 2 * 5 + 3 * 3 = 19 blocks at most,
    and 19 blocks can serve no longer request. Encoders keep nothing: their layout is `NO_MEMORY`.
    """

    groups: tuple[KvGroup, ...] = ONE_GROUP
    num_state_blocks: int = 0  # of one copy
    state_packing: str = ""  # of a copy into its blocks
    num_drafted: int = 0  # tokens that are drafted at once: a request has as many more copies

    @property
    def is_empty(self) -> bool:
        return not self.groups and not self.has_state

    @property
    def has_state(self) -> bool:
        return self.num_state_blocks > 0

    def max_state_blocks(self, *, is_caching: bool = True) -> int:
        """Return the blocks of a request that are no blocks of tokens, at most.

        `is_caching`: with a prefix cache, which the request may have its first state from.
        """
        return (self.num_state_sides + is_caching) * self.num_state_blocks

    @property
    def num_state_sides(self) -> int:
        """Return the copies of the state that a request takes turns with."""
        return NUM_STATE_COPIES + self.num_drafted

    def num_blocks(self, num_token_blocks: int, *, is_caching: bool = True) -> int:
        """Return the blocks of a request with so many blocks of tokens in each group."""
        num_state_blocks = self.max_state_blocks(is_caching=is_caching)
        return num_token_blocks * len(self.groups) + num_state_blocks

    def max_token_blocks(self, num_blocks: int, *, is_caching: bool = True) -> int:
        """Return the blocks of tokens in each group that fit, the inverse of `num_blocks`."""
        num_state_blocks = self.max_state_blocks(is_caching=is_caching)
        return (num_blocks - num_state_blocks) // len(self.groups)

    @property
    def lasting_group(self) -> int | None:
        """Return the first KV group that keeps all tokens; None if there is none."""
        kept = (number for number, group in enumerate(self.groups) if not group.spec.forgets)
        return next(kept, None)

    @property
    def kinds(self) -> tuple[MemoryKind, ...]:
        """Return the kinds of memory as peers must have them, too."""
        groups = [
            MemoryKind(
                group.layers,
                group.spec.window or 0,
                group.spec.chunk or 0,
                num_kv_heads=0 if group.spec.heads is None else group.spec.heads.num,
                head_dim=0 if group.spec.heads is None else group.spec.heads.dim,
                layer_places=group.layer_places,
            )
            for group in self.groups
        ]
        states = [MemoryKind(state=self.state_packing)] if self.state_packing else []
        return (*groups, *states)


NO_MEMORY = CacheLayout(groups=())


def group_layers(
    specs: Sequence[KvCacheSpec] | Mapping[int, KvCacheSpec],
) -> tuple[KvGroup, ...]:
    """Divide the layers of a model into groups of at most `places_per_block` places.

    A mapping leaves out the layers that have no keys and values. If one spec has `heads`, all have.

    Groups with full attention come first. Layers of one spec are dealt out to its groups in turn,
    so that a place is computed in all groups after about the same layer.
    """
    by_spec: dict[KvCacheSpec, list[int]] = {}
    by_layer = specs if isinstance(specs, Mapping) else dict(enumerate(specs))
    for layer, spec in by_layer.items():
        by_spec.setdefault(spec, []).append(layer)
    widths = _layer_places(by_spec)
    size = _places_per_block(
        [(len(layers), widths[spec], spec.forgets) for spec, layers in by_spec.items()]
    )
    groups = []
    for spec, layers in sorted(by_spec.items(), key=lambda item: item[0].forgets):
        num_groups = -(-len(layers) // (size // widths[spec]))
        groups += [
            KvGroup(spec, tuple(layers[first::num_groups]), widths[spec])
            for first in range(num_groups)
        ]
    return tuple(groups)


class LayerPlace(NamedTuple):
    """Location of the keys and values of a layer."""

    group: int  # whose block table the layer uses
    place: int  # in a block, the first one


def layer_places(groups: Sequence[KvGroup]) -> tuple[LayerPlace, ...]:
    """Return the place of each layer with keys and values, in the order of the layers."""
    by_layer = {
        layer: LayerPlace(number, place * group.layer_places)
        for number, group in enumerate(groups)
        for place, layer in enumerate(group.layers)
    }
    return tuple(by_layer[layer] for layer in sorted(by_layer))


def places_per_block(groups: Iterable[KvGroup]) -> int:
    """Return the number of places for layers in a block."""
    return max(group.num_places for group in groups)


def places_done(groups: Sequence[KvGroup], num_layers: int) -> int:
    """Return the number of places that are computed in all groups after `num_layers` layers."""
    unfinished = [group for group in groups if group.layers[-1] >= num_layers]
    computed = [
        group.layer_places * sum(layer < num_layers for layer in group.layers)
        for group in unfinished
    ]
    return min(computed, default=places_per_block(groups))


def _layer_places(specs: Iterable[KvCacheSpec]) -> dict[KvCacheSpec, int]:
    """Return the places that a layer of each spec takes: few, and hardly larger than the layers."""
    sizes = {spec: spec.heads.size for spec in specs if spec.heads is not None}
    if not sizes:
        return dict.fromkeys(specs, 1)
    smallest = min(sizes.values())
    for parts in range(1, MAX_PLACES + 1):
        size = -(-smallest // parts)
        # Of another layer that is slightly larger, too.
        places = {spec: max(1, round(each / size)) for spec, each in sizes.items()}
        place_size = max(each / places[spec] for spec, each in sizes.items())
        if all(places[spec] * place_size <= (1 + MAX_PADDING) * sizes[spec] for spec in sizes):
            return places
    unit = math.gcd(*sizes.values())
    return {spec: size // unit for spec, size in sizes.items()}


def _places_per_block(layers_by_spec: Sequence[tuple[int, int, bool]]) -> int:
    """Return the number of places in a block for layers of specs.

    `layers_by_spec`: how many layers, the places that each takes, and whether they forget tokens.
    Empty places are weighed against the number of groups. They cost most in groups that keep all
    tokens, which have almost all blocks of long requests.
    """
    num_needed = sum(num * places for num, places, _ in layers_by_spec)

    def cost(size: int) -> tuple[bool, float]:
        num_groups, num_places, total = 0, 0, 0.0
        for num, places, forgets in layers_by_spec:
            count = -(-num // (size // places))
            num_groups, num_places = num_groups + count, num_places + count * size
            waste = count * size / (num * places) - 1
            total += waste * (FORGETTING_COST if forgets else 1)
        return num_places > num_needed * (1 + MAX_WASTE), total + GROUP_COST * num_groups

    largest = max(num * places for num, places, _ in layers_by_spec)
    smallest = max(places for _, places, _ in layers_by_spec)
    return min(range(largest, smallest - 1, -1), key=cost)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the KV cache."""

    num_blocks: int
    block_size: int = 16
    layout: CacheLayout = CacheLayout()
    enable_prefix_caching: bool = True
    # Identifies everything the KV of given tokens depends on: weights, dtype, layout.
    model_salt: str = ""
    # Longer prompts share blocks only with prompts of the same length, for models whose KV depends
    # on the prompt length (dynamic rope). None: no limit.
    max_shareable_prompt_len: int | None = None
    collect_events: bool = False  # if set, `take_events` must be called regularly
    collect_token_ids: bool = False  # in these events

    def __post_init__(self) -> None:
        has_enough = self.num_blocks >= 1 or self.layout.is_empty
        require_setting("num_blocks", self.num_blocks, has_enough, "at least 1")
        require_setting("block_size", self.block_size, self.block_size >= 1, "at least 1")
        num_groups, num_for_state = len(self.layout.groups), self._max_state_blocks
        if num_for_state and self.max_blocks_per_group < 1:
            raise InvalidConfig(
                f"num_blocks is {self.num_blocks}; it must be at least "
                f"{num_for_state + num_groups}: {num_for_state} for the recurrent state of "
                f"one request, and {num_groups} for its tokens. Start the node with a larger "
                "--kv-cache-memory"
            )

    @property
    def max_blocks_per_group(self) -> int:
        """The blocks of tokens that one request can have in each group."""
        return self.layout.max_token_blocks(self.num_blocks, is_caching=self.enable_prefix_caching)

    def describe_blocks(self, num_token_blocks: int) -> str:
        """Describe the blocks of a request with so many blocks of tokens in each group."""
        num_blocks = self.layout.num_blocks(num_token_blocks, is_caching=self.enable_prefix_caching)
        state = f" ({self._max_state_blocks} of them for the recurrent state)"
        return f"{num_blocks} KV blocks{state if self._max_state_blocks else ''}"

    @property
    def naming(self) -> PrefixNaming:
        return PrefixNaming(
            self.block_size,
            self.model_salt,
            max_shareable_prompt_len=self.max_shareable_prompt_len,
            needs_snapshot=self.layout.has_state,
        )

    @property
    def _max_state_blocks(self) -> int:
        return self.layout.max_state_blocks(is_caching=self.enable_prefix_caching)
