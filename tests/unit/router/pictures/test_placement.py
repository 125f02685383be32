"""Images in rendered chats: texts in place of marks, and the segments of their placeholders."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from baton.core.errors import InvalidRequest
from baton.core.media import DIGEST_BYTES, MediaSegment, Picture
from baton.router.pictures.plan import (
    Detail,
    PicturePlan,
    PreparedImage,
    Size,
    Tile,
    put_texts,
    segments_in,
)

PIXEL = Size(1, 1)
PLACEHOLDER = 9


@dataclass(frozen=True, slots=True)
class StarFormat:
    mark: str = "*"
    placeholder: str = "#"

    def plan(self, image: Size, detail: Detail = Detail.AUTO) -> PicturePlan:
        raise NotImplementedError


def _image(text: str, *numbers_of_tokens: int) -> PreparedImage:
    tiles = tuple(Tile(0, 0, PIXEL, PIXEL, 1, number) for number in numbers_of_tokens)
    pictures = tuple(Picture(_digest(text, tile), 1, 1, b"rgb") for tile in range(len(tiles)))
    return PreparedImage(PicturePlan((), 0, tiles, text), pictures)


def _digest(text: str, tile: int) -> bytes:
    return f"{text}{tile}".encode().ljust(DIGEST_BYTES)


def test_marks_become_the_texts_of_the_images_in_order() -> None:
    images = [_image("[##]", 2), _image("[#]", 1)]

    assert put_texts("a * b *", images, StarFormat()) == "a [##] b [#]"


@pytest.mark.parametrize(("text", "cause"), [("* and *", "leave it out"), ("none", "shows 0 of 1")])
def test_a_chat_without_one_mark_for_each_image_is_refused(text: str, cause: str) -> None:
    with pytest.raises(InvalidRequest, match=cause):
        put_texts(text, [_image("#", 1)], StarFormat())


def test_runs_of_placeholders_take_the_rows_of_their_pictures() -> None:
    images = [_image("a", 2, 3), _image("b", 1)]
    # The second tile is broken by a token of text, and the next image follows at once.
    token_ids = [1, 9, 9, 2, 9, 9, 3, 9, 9]

    assert segments_in(token_ids, images, PLACEHOLDER) == (
        MediaSegment(1, 2, _digest("a", 0), 0, 2),
        MediaSegment(4, 2, _digest("a", 1), 0, 3),
        MediaSegment(7, 1, _digest("a", 1), 2, 3),
        MediaSegment(8, 1, _digest("b", 0), 0, 1),
    )


def test_placeholders_that_a_client_wrote_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="3 tokens that stand for images"):
        segments_in([9, 9, 1, 9], [_image("a", 2)], PLACEHOLDER)
