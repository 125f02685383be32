"""Block hashes: equal for equal prefixes, different otherwise."""

from __future__ import annotations

from itertools import product

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import PrefixKeys
from baton.core.media import MediaSegment
from baton.engine.kv_cache.block_hashes import BlockHash, PrefixNaming, block_hashes, extend_hashes

ROOT = PrefixNaming(16, "model").root()


def test_only_full_blocks_have_a_hash() -> None:
    counts = [len(block_hashes(range(n), 4, ROOT)) for n in (0, 3, 4, 7, 8)]

    assert counts == [0, 0, 1, 1, 2]


def test_equal_tokens_after_different_prefixes_have_different_hashes() -> None:
    first = block_hashes([1, 2, 3, 4], 2, ROOT)
    second = block_hashes([9, 9, 3, 4], 2, ROOT)

    assert first[1] != second[1]


def test_hashes_depend_on_salt_and_seed() -> None:
    roots = [
        ROOT,
        PrefixNaming(16, "model", 1).root(),
        PrefixNaming(16, "other").root(),
        PrefixNaming(16, "model").root(PrefixKeys("tenant")),
        PrefixNaming(16, "model:").root(),
        PrefixNaming(16, "").root(PrefixKeys("model")),
    ]

    hashes = {block_hashes([1, 2], 2, root)[0] for root in roots}

    assert len(hashes) == len(roots)


def test_a_salt_cannot_be_moved_from_one_field_into_the_other() -> None:
    one, other = PrefixNaming(16, "a:b"), PrefixNaming(16, "a")

    assert one.root(PrefixKeys("c")) != other.root(PrefixKeys("b:c"))


def test_adapters_share_no_blocks_with_each_other_or_with_the_base_model() -> None:
    naming = PrefixNaming(16, "model")

    roots = {naming.root(PrefixKeys(*keys)) for keys in product(("", "a"), ("", "a", "b"))}

    assert len(roots) == 6


PLACEHOLDERS = [1, 2, 9, 9, 9, 9, 9, 3, 4, 5]  # an image from 2 up to 7, in blocks of two


def _names(*images: MediaSegment) -> list[BlockHash]:
    return PrefixNaming(2).names(PLACEHOLDERS, 10, PrefixKeys(media=images))


def test_prompts_share_the_blocks_in_front_of_their_first_different_image() -> None:
    cat, dog = (_names(MediaSegment(2, 5, bytes([content]) * 32)) for content in b"cd")

    assert cat[:1] == dog[:1] == _names()[:1]
    assert not set(cat[1:]) & set(dog[1:]) & set(_names()[1:])
    assert len(set(cat[1:] + dog[1:] + _names()[1:])) == 3 * 4


def test_images_at_other_places_have_other_names() -> None:
    digest = bytes(32)
    places = [(2, 5), (2, 4), (3, 4)]

    seconds = {_names(MediaSegment(*place, digest))[1] for place in places}
    two = _names(MediaSegment(2, 2, digest), MediaSegment(4, 3, digest))[1:]

    assert len(seconds) == 3
    assert not set(two) & set(_names(MediaSegment(2, 5, digest)))


def test_parts_of_a_picture_are_told_apart_by_their_rows() -> None:
    digest = b"d" * 32

    first, second = (_names(MediaSegment(2, 5, digest, row))[1:] for row in (0, 5))
    assert not set(first) & set(second)


def test_a_segment_without_a_whole_digest_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a digest of 31 bytes instead of 32"):
        MediaSegment(0, 1, bytes(31))


def test_no_salt_yields_the_hashes_of_a_prompt_of_another_length() -> None:
    """With dynamic RoPE, the length of a long prompt is part of the names of its blocks."""
    naming = PrefixNaming(16, max_shareable_prompt_len=1000)
    salts = ("", "5000:", "5000", ":", "a", "5000:a", '5000,"', "null", "[5000]")

    roots = {
        naming.root(PrefixKeys(salt), length) for salt, length in product(salts, (64, 5000, 5001))
    }

    assert len(roots) == len(salts) * 3


def test_prompts_up_to_the_limit_share_their_blocks() -> None:
    naming = PrefixNaming(16, max_shareable_prompt_len=1000)

    keys = PrefixKeys("a")

    assert naming.root(keys, 64) == naming.root(keys, 1000) == PrefixNaming(16).root(keys)


def test_incremental_hashing_equals_hashing_at_once() -> None:
    grown: list[BlockHash] = []
    for end in range(1, 12):
        extend_hashes(grown, ROOT, list(range(end)), 3)

    assert grown == block_hashes(range(11), 3, ROOT)


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    """Nodes and routers of different versions compare hashes; a change breaks compatibility."""
    hashes = block_hashes([1, 2, 3, 4], 2, PrefixNaming(2, "m", 7).root(PrefixKeys("s")))

    assert [h.hex() for h in hashes] == GOLDEN


def test_the_largest_token_id_is_hashable() -> None:
    assert len(block_hashes([2**32 - 1], 1, ROOT)) == 1


GOLDEN = ["a22b6712124d433f63e91f6a695a4c07", "fd78eceafb1928a4c4d93d8775515313"]
