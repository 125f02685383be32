"""Grouping of layers, and the tokens that each group needs."""

from __future__ import annotations

import pytest

from baton.engine.kv_cache.groups import (
    FULL,
    MAX_WASTE,
    CacheLayout,
    KvCacheSpec,
    KvGroup,
    KvHeads,
    group_layers,
    layer_places,
    places_done,
    places_per_block,
)
from baton.kv_transfer.layout import MemoryKind

WINDOW = KvCacheSpec(window=512)
CHUNK = KvCacheSpec(chunk=8192)


def every(period: int, num_layers: int, spec: KvCacheSpec = WINDOW) -> list[KvCacheSpec]:
    """Return the specs of layers of which the last of each period has full attention."""
    return [FULL if (layer + 1) % period == 0 else spec for layer in range(num_layers)]


def test_layers_of_one_spec_are_one_group() -> None:
    assert group_layers([FULL] * 3) == (KvGroup(FULL, (0, 1, 2)),)
    assert group_layers([WINDOW] * 2) == (KvGroup(WINDOW, (0, 1)),)


def test_layers_of_several_specs_are_grouped_with_full_attention_first() -> None:
    groups = group_layers(every(3, 6))

    assert groups == (
        KvGroup(FULL, (2, 5)),
        KvGroup(WINDOW, (0, 3)),
        KvGroup(WINDOW, (1, 4)),
    )


@pytest.mark.parametrize(
    ("specs", "num_groups", "size"),
    [
        (every(6, 26), 7, 4),  # Gemma 3 1B
        (every(6, 34), 7, 5),  # Gemma 3 4B
        (every(6, 62), 6, 11),  # Gemma 3 27B
        (every(2, 24), 2, 12),  # gpt-oss 20B
        (every(4, 48, CHUNK), 4, 12),  # Llama 4 Scout
    ],
)
def test_grouping_wastes_little_memory_for_known_models(
    specs: list[KvCacheSpec], num_groups: int, size: int
) -> None:
    groups = group_layers(specs)

    assert (len(groups), places_per_block(groups)) == (num_groups, size)
    assert num_groups * size <= len(specs) * (1 + MAX_WASTE)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))


def unlike(period: int, num_layers: int, window: KvHeads, full: KvHeads) -> list[KvCacheSpec]:
    """Return specs like those of `every`, of layers with unlike heads."""
    specs = KvCacheSpec(window=512, heads=window), KvCacheSpec(heads=full)
    return [specs[(layer + 1) % period == 0] for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("specs", "num_groups", "waste"),
    [
        (unlike(5, 15, KvHeads(1, 256), KvHeads(1, 512)), 3, 0.0),  # Gemma 4 E2B
        (unlike(6, 24, KvHeads(2, 256), KvHeads(2, 512)), 7, 0.0),  # Gemma 4 E4B
        (unlike(6, 30, KvHeads(8, 256), KvHeads(2, 512)), 10, 0.091),  # Gemma 4 26B-A4B
        (unlike(6, 60, KvHeads(16, 256), KvHeads(4, 512)), 11, 0.0),  # Gemma 4 31B
        (unlike(2, 8, KvHeads(3, 64), KvHeads(5, 64)), 2, 0.25),
    ],
)
def test_layers_of_unlike_sizes_waste_little_memory(
    specs: list[KvCacheSpec], num_groups: int, waste: float
) -> None:
    groups = group_layers(specs)

    sizes = {group.spec.heads.size: group.layer_places for group in groups if group.spec.heads}
    place_size = max(size / places for size, places in sizes.items())
    needed = sum(spec.heads.size for spec in specs if spec.heads)
    allocated = len(groups) * places_per_block(groups) * place_size
    assert len(groups) == num_groups
    assert allocated / needed - 1 == pytest.approx(waste, abs=1e-3)


@pytest.mark.parametrize(
    "specs", [every(6, 26), unlike(5, 15, KvHeads(1, 256), KvHeads(1, 512))], ids=["like", "unlike"]
)
def test_each_layer_has_places_of_its_own(specs: list[KvCacheSpec]) -> None:
    groups = group_layers(specs)

    places = layer_places(groups)

    taken = [
        (group, place + more)
        for group, place in places
        for more in range(groups[group].layer_places)
    ]
    assert len(set(taken)) == len(taken)
    assert max(place for _, place in taken) < places_per_block(groups)
    for layer, (group, place) in enumerate(places):
        assert groups[group].layers[place // groups[group].layer_places] == layer


def test_a_place_is_done_once_all_groups_have_computed_it() -> None:
    groups = group_layers(every(3, 6))

    assert [places_done(groups, num_layers) for num_layers in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_layer_of_several_places_is_done_with_all_of_them() -> None:
    groups = group_layers(unlike(3, 6, KvHeads(1, 8), KvHeads(1, 16)))

    assert [(group.layers, group.layer_places) for group in groups] == [
        ((2, 5), 2),
        ((0, 1, 3, 4), 1),
    ]
    assert [places_done(groups, num_layers) for num_layers in range(7)] == [0, 0, 0, 2, 2, 2, 4]


def test_groups_with_fewer_layers_do_not_delay_the_others() -> None:
    groups = (KvGroup(FULL, (0, 1, 3)), KvGroup(WINDOW, (2,)))

    assert [places_done(groups, num_layers) for num_layers in range(5)] == [0, 0, 0, 2, 3]


@pytest.mark.parametrize(
    ("spec", "unseen"),
    [
        (FULL, [0, 0, 0, 0, 0, 0]),
        (KvCacheSpec(window=1), [0, 1, 2, 3, 4, 5]),
        (KvCacheSpec(window=3), [0, 0, 0, 1, 2, 3]),
        (KvCacheSpec(chunk=2), [0, 0, 2, 2, 4, 4]),
    ],
)
def test_tokens_before_the_window_are_skipped(spec: KvCacheSpec, unseen: list[int]) -> None:
    assert [spec.num_unseen(num_tokens) for num_tokens in range(6)] == unseen


@pytest.mark.parametrize("is_caching", [False, True])
@pytest.mark.parametrize("num_state_blocks", [0, 3])
def test_the_longest_request_fits_and_a_longer_one_does_not(
    num_state_blocks: int, is_caching: bool
) -> None:
    layout = CacheLayout((KvGroup(FULL), KvGroup(WINDOW)), num_state_blocks)

    for num_blocks in range(12, 40):
        longest = layout.max_token_blocks(num_blocks, is_caching=is_caching)
        assert layout.num_blocks(longest, is_caching=is_caching) <= num_blocks
        assert layout.num_blocks(longest + 1, is_caching=is_caching) > num_blocks


def test_a_layout_contains_everything_that_peers_must_agree_on() -> None:
    layout = CacheLayout((KvGroup(FULL, (0, 2)), KvGroup(WINDOW, (1,))), 3, "state: one layer")

    assert layout.kinds == (
        MemoryKind((0, 2)),
        MemoryKind((1,), window=512),
        MemoryKind(state="state: one layer"),
    )
    assert CacheLayout().kinds == (MemoryKind(),)
