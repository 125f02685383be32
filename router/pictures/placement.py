"""Images in a rendered chat: their texts in place of marks, and their placeholder tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.core.errors import InvalidRequest
from baton.core.media import MediaSegment
from baton.router.pictures.plan import PictureFormat, PreparedImage


def put_texts(text: str, images: Sequence[PreparedImage], images_as: PictureFormat) -> str:
    """Replace the template's marks of images by the texts of their plans.

    Raises InvalidRequest if there is not one mark for each.
    """
    first, *others = text.split(images_as.mark)
    if len(others) > len(images):
        raise InvalidRequest(
            f"messages contain {images_as.mark!r}, which stands for an image in this model's "
            "prompts: leave it out of texts",
            "messages",
        )
    if len(others) < len(images):
        raise InvalidRequest(
            f"the chat template shows {len(others)} of {len(images)} images: it takes none in "
            "messages of this role",
            "messages",
        )
    pairs = zip(images, others, strict=True)
    return first + "".join(image.plan.text + other for image, other in pairs)


def segments_in(
    token_ids: Sequence[int], images: Sequence[PreparedImage], placeholder_id: int
) -> tuple[MediaSegment, ...]:
    """Return the runs of placeholders in a prompt, with the rows of pictures that they take.

    Raises InvalidRequest if there is not one placeholder for each row.
    """
    places = [place for place, token_id in enumerate(token_ids) if token_id == placeholder_id]
    tiles = [
        (picture.digest, tile)
        for image in images
        for picture, tile in zip(image.pictures, image.plan.tiles, strict=True)
    ]
    num_rows = sum(tile.num_tokens for _, tile in tiles)
    if num_rows != len(places):
        raise InvalidRequest(
            f"messages have {len(places)} tokens that stand for images, whose encodings have "
            f"{num_rows} rows: leave the model's special tokens out of texts",
            "messages",
        )
    segments, first = list[MediaSegment](), 0
    for digest, tile in tiles:
        for start, num_tokens, row in _runs(places[first : first + tile.num_tokens]):
            segments.append(MediaSegment(start, num_tokens, digest, row, tile.columns))
        first += tile.num_tokens
    return tuple(segments)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the start and length of each run of successive places, and the index of the first."""
    first = 0
    for index in range(1, len(places) + 1):
        if index == len(places) or places[index] != places[index - 1] + 1:
            yield places[first], index - first, first
            first = index
