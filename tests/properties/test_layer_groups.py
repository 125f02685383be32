"""Grouping of layers by what they keep, and by unlike heads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache.groups import (
    FULL,
    KvCacheSpec,
    KvGroup,
    KvHeads,
    group_layers,
    layer_places,
    places_done,
    places_per_block,
)

MAX_PADDING = 1.05
HEADS = st.builds(KvHeads, st.integers(1, 16), st.sampled_from([64, 96, 128, 256, 512]))
KINDS = st.sampled_from([FULL, KvCacheSpec(window=24), KvCacheSpec(chunk=64)])


@st.composite
def drawn_specs(draw: st.DrawFn) -> list[KvCacheSpec]:
    """Return the specs of layers of up to three kinds, of which all or none have heads."""
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3, unique=True))
    if draw(st.booleans()):
        kinds = [KvCacheSpec(kind.window, kind.chunk, draw(HEADS)) for kind in kinds]
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=40))


def taken_places(groups: tuple[KvGroup, ...], layer: int, first: int, group: int) -> list[int]:
    assert layer in groups[group].layers
    return list(range(first, first + groups[group].layer_places))


@given(drawn_specs())
def test_each_layer_has_places_that_no_other_has(specs: list[KvCacheSpec]) -> None:
    groups = group_layers(specs)

    places = layer_places(groups)

    taken = [
        (group, place)
        for layer, (group, first) in enumerate(places)
        for place in taken_places(groups, layer, first, group)
    ]
    assert len(places) == len(specs)
    assert len(set(taken)) == len(taken)
    assert max(place for _, place in taken) < places_per_block(groups)
    assert [groups[group].spec for group, _ in places] == specs


@given(drawn_specs())
def test_the_places_of_a_layer_are_hardly_larger_than_its_heads(specs: list[KvCacheSpec]) -> None:
    groups = group_layers(specs)

    sizes = [(g.spec.heads.size, g.layer_places) for g in groups if g.spec.heads is not None]
    place_size = max((size / places for size, places in sizes), default=0.0)
    assert all(places * place_size <= MAX_PADDING * size for size, places in sizes)


@given(drawn_specs())
def test_a_place_is_done_when_its_layers_are_in_all_groups(specs: list[KvCacheSpec]) -> None:
    groups = group_layers(specs)
    places = layer_places(groups)

    for num_layers in range(len(specs) + 1):
        done = places_done(groups, num_layers)
        late = [
            place
            for layer, (group, first) in enumerate(places)
            for place in taken_places(groups, layer, first, group)
            if layer >= num_layers
        ]
        assert done <= min(late, default=places_per_block(groups))
    assert places_done(groups, 0) == 0
    assert places_done(groups, len(specs)) == places_per_block(groups)
