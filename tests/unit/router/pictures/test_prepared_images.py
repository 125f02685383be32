"""Cache of prepared images."""

from __future__ import annotations

from baton.core.media import Picture
from baton.router.pictures.plan import (
    MAX_UUIDS,
    ImageKey,
    PicturePlan,
    PreparedImage,
    PreparedImages,
)

PLAN = PicturePlan((), 0, (), "")


def key(name: str, tenant: str = "") -> ImageKey:
    return ImageKey(tenant, name.encode())


def image(num_pixels: int) -> PreparedImage:
    return PreparedImage(PLAN, (Picture(bytes(32), 1, num_pixels, bytes(3 * num_pixels)),))


def test_the_images_that_were_used_last_are_kept() -> None:
    images = PreparedImages(max_bytes=30)
    for name in "abc":
        images.add(key(name), image(3))

    assert images.find(key("a"))  # which makes it the last one used
    images.add(key("d"), image(3))

    assert [name for name in "abcd" if images.find(key(name))] == ["a", "c", "d"]


def test_an_image_above_the_limit_is_not_kept() -> None:
    images = PreparedImages(max_bytes=30)
    images.add(key("a"), image(11))
    images.add(key("b"), image(10))

    assert images.find(key("a")) is None
    assert images.find(key("b"))


def test_an_image_that_is_added_twice_counts_once() -> None:
    images = PreparedImages(max_bytes=30)
    for _ in range(3):
        images.add(key("a"), image(5))
    images.add(key("b"), image(5))

    assert images.find(key("a"))
    assert images.find(key("b"))


def test_a_uuid_stands_for_the_image_that_was_sent_with_it_last() -> None:
    images = PreparedImages(max_bytes=30)
    for name in "ab":
        images.add(key(name), image(5))
        images.name(key("uuid"), key(name))

    assert images.find_key(key("uuid")) == key("b")
    assert images.find_key(key("uuid", "other")) is None
    images.add(key("c"), image(10))  # in place of all others
    assert images.find_key(key("uuid")) is None


def test_the_uuids_that_were_used_last_are_kept() -> None:
    images = PreparedImages(max_bytes=30)
    images.add(key("a"), image(1))
    for number in range(MAX_UUIDS):
        images.name(key(f"{number}"), key("a"))

    assert images.find_key(key("0"))
    images.name(key("new"), key("a"))

    assert [number for number in ("0", "1", "new") if images.find_key(key(number))] == ["0", "new"]


def test_clients_share_no_images() -> None:
    images = PreparedImages(max_bytes=30)
    images.add(key("a", "one"), image(1))

    assert images.find(key("a", "other")) is None
