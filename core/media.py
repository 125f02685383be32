"""Pictures of prompts: their pixels, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.errors import InvalidRequest

DIGEST_BYTES = 32
NUM_CHANNELS = 3  # red, green, blue


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels as a vision tower takes them: those of a whole image, or of a tile of one."""

    digest: bytes  # of the image's file, of how it was prepared, and of which tile it is
    height: int
    width: int
    rgb: bytes = field(repr=False)  # rows of pixels of three bytes

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        size = self.height * self.width * NUM_CHANNELS
        if self.height < 1 or self.width < 1 or len(self.rgb) != size:
            raise InvalidRequest(
                f"a picture of {self.width}x{self.height} pixels has {len(self.rgb)} bytes"
            )


@dataclass(frozen=True, slots=True)
class MediaSegment:
    """A run of placeholder tokens in a prompt that stands for a picture, or for a part of it.

    All other tokens of a prompt are text.
    """

    start: int  # position of its first token
    num_tokens: int
    digest: bytes  # of the picture, since the placeholders of all pictures are the same token
    first: int = 0  # row of the picture's encoding that its first token takes
    columns: int = 1  # of the grid that the picture's tokens form, for models that use it

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        if self.start < 0 or min(self.num_tokens, self.columns) < 1 or self.first < 0:
            raise InvalidRequest(
                f"a segment of {self.num_tokens} tokens from {self.start}, of an encoding from "
                f"{self.first}: it needs a token"
            )

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether a token from `start` up to `end` is in the segment."""
        return self.start < end and start < self.start + self.num_tokens


class PicturePlace(NamedTuple):
    """Picture of which some tokens are in a block."""

    digest: bytes
    offset: int  # of the picture's first token from the block's start; negative: it began before


def pictures_within(
    media: Sequence[MediaSegment], start: int, end: int
) -> tuple[PicturePlace, ...]:
    """Return the pictures of the tokens from `start` up to `end`, once each time they are shown."""
    places: dict[PicturePlace, None] = {}
    begin = 0
    for segment in media:
        if segment.first == 0:  # the other segments of a picture follow
            begin = segment.start
        if segment.overlaps(start, end):
            places[PicturePlace(segment.digest, begin - start)] = None
    return tuple(places)


def _check_digest(digest: bytes) -> None:
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a digest of {len(digest)} bytes instead of {DIGEST_BYTES}")
