"""Pictures of prompts: their pixels, the tokens that stand for them, and stored encodings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.errors import InvalidRequest

DIGEST_BYTES = 32
NUM_CHANNELS = 3  # red, green, blue
NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Before the salt of a prompt that stores an encoding. The salt of a client begins with its owner,
# or with a colon.
PICTURE_SALT = "picture!"


# Rows of a picture's encoding, by its height and width. Raises ValueError for a size that the tower
# does not encode.
PictureRows = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels as a vision tower takes them: those of a whole image, or of a tile of one.

    With `dtype`, embeddings of a client instead: `height` rows of `width` numbers.
    """

    digest: bytes  # of the image's file, of how it was prepared, and of which tile it is
    height: int
    width: int
    rgb: bytes = field(repr=False)  # rows of pixels of three bytes, or of numbers
    dtype: str = ""

    def __post_init__(self) -> None:
        _check_digest(self.digest)
        if self.dtype and self.dtype not in NUMBER_BYTES:
            raise InvalidRequest(f"embeddings of {self.dtype}: one of {', '.join(NUMBER_BYTES)}")
        size = self.height * self.width * NUMBER_BYTES.get(self.dtype, NUM_CHANNELS)
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


class PictureInBlock(NamedTuple):
    """Picture of which some tokens are in a block."""

    digest: bytes
    offset: int  # of the picture's first token from the block's start; negative: it began before


def pictures_within(
    media: Sequence[MediaSegment], start: int, end: int
) -> tuple[PictureInBlock, ...]:
    """Return the pictures of the tokens from `start` up to `end`, once each time they are shown."""
    found: dict[PictureInBlock, None] = {}
    begin = 0
    for segment in media:
        if segment.first == 0:  # the other segments of a picture follow
            begin = segment.start
        if segment.overlaps(start, end):
            found[PictureInBlock(segment.digest, begin - start)] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """Prompt whose KV blocks hold the encoding of a picture instead of keys and values.

    So nodes cache an encoding, keep it in tiers and send it to each other as they do with KV. Its
    token ids mean nothing. The last one is never cached, since a node computes one token at least.
    """

    digest: bytes
    num_blocks: int
    block_size: int

    @property
    def num_cached_tokens(self) -> int:
        """Return the tokens of all its full blocks, which hold the encoding."""
        return self.num_blocks * self.block_size

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (0,) * (self.num_cached_tokens + 1)

    @property
    def media(self) -> tuple[MediaSegment, ...]:
        return (MediaSegment(0, self.num_cached_tokens, self.digest),)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of encodings in KV blocks, whose bytes they fill in order."""

    row_bytes: int
    block_bytes: int
    block_size: int  # tokens of KV in a block
    group: int = 0  # KV group of the blocks

    def num_blocks(self, num_rows: int) -> int:
        return -(-num_rows * self.row_bytes // self.block_bytes)

    def prompt(self, digest: bytes, num_rows: int) -> StoredPicture:
        """Return the prompt that stores the encoding of a picture."""
        return StoredPicture(digest, self.num_blocks(num_rows), self.block_size)


def picture_salt(cache_salt: str) -> str:
    """Return the salt of stored encodings for a salt of texts, whose KV must not share names."""
    return f"{PICTURE_SALT}{cache_salt}"


def encoding_rows(media: Iterable[MediaSegment]) -> dict[bytes, int]:
    """Return the rows of each picture's encoding that a prompt takes, by digest."""
    num_rows: dict[bytes, int] = {}
    for segment in media:
        num_rows[segment.digest] = max(
            num_rows.get(segment.digest, 0), segment.first + segment.num_tokens
        )
    return num_rows


def _check_digest(digest: bytes) -> None:
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(f"a digest of {len(digest)} bytes instead of {DIGEST_BYTES}")
