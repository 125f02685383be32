"""Prepared images: how a file becomes pictures, the text in its place, those kept. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from baton.core.errors import InvalidRequest
from baton.core.media import NUM_CHANNELS, MediaSegment, Picture

MAX_UUIDS = 4_096  # of all clients


class Detail(Enum):
    """Detail that a client asks for, as in OpenAI's API. All but LOW are the model's own."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"
    ORIGINAL = "original"


@dataclass(frozen=True, slots=True)
class ImageFile:
    """Image of a message, with the field that has it."""

    data: bytes  # a PNG, JPEG, WebP or GIF file; empty: it is fetched from `url`
    where: str
    detail: Detail = Detail.AUTO
    url: str = ""
    uuid: str = ""  # the client's own name, by which it finds an image that it has sent before

    @property
    def has_content(self) -> bool:
        return bool(self.data or self.url or not self.uuid)


class ImageSource(Protocol):
    """Place from which images of URLs come."""

    async def fetch(
        self, images: Sequence[ImageFile], client: str, hold: Callable[[int], None]
    ) -> list[ImageFile]:
        """Return the images with their data.

        Clients take turns. `hold` counts bytes as they arrive. Raises InvalidRequest and
        UnsupportedInput, which name the field, QueueFull, and what `hold` raises.
        """
        ...


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels of an image."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Part of a resized image that a vision tower encodes alone, and its placeholders."""

    left: int
    top: int
    box: Size  # of the part
    size: Size  # of the picture: the part is resized to it
    rows: int  # of the grid of its placeholders
    columns: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def num_bytes(self) -> int:
        return self.size.width * self.size.height * NUM_CHANNELS


@dataclass(frozen=True, slots=True)
class PicturePlan:
    """Operations that turn an image into pictures, and the text that replaces its mark."""

    resizes: tuple[Size, ...]  # of the whole image, one after the other
    resample: int  # Pillow's number of the filter
    tiles: tuple[Tile, ...]  # in the order of their placeholders in the text
    text: str


class PictureFormat(Protocol):
    """Images as a model takes them. A frozen value: its `repr` has all settings."""

    @property
    def mark(self) -> str:
        """Text of the chat template for an image, which the text of its plan replaces."""
        ...

    @property
    def placeholder(self) -> str:
        """Token that stands for one row of an encoding."""
        ...

    def plan(self, image: Size, detail: Detail = Detail.AUTO) -> PicturePlan:
        """Plan an upright image of this size. Raises InvalidRequest."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """Image of a request as the model takes it: a picture for each tile of the plan."""

    plan: PicturePlan
    pictures: tuple[Picture, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(picture.rgb) for picture in self.pictures)


def whole_image(size: Size, resample: int, rows: int, columns: int, text: str) -> PicturePlan:
    """Return the plan of an image that is resized and becomes one picture."""
    tile = Tile(0, 0, box=size, size=size, rows=rows, columns=columns)
    return PicturePlan((size,), resample, (tile,), text)


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


class ImageKey(NamedTuple):
    tenant: str  # so that no tenant finds out what another one has sent
    name: bytes  # digest of the file, or of a client's uuid, and of how it is prepared


class PreparedImages:
    """Keeps the images that were used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._image_by_key: OrderedDict[ImageKey, PreparedImage] = OrderedDict()
        self._key_by_uuid: OrderedDict[ImageKey, ImageKey] = OrderedDict()

    def find(self, key: ImageKey) -> PreparedImage | None:
        image = self._image_by_key.get(key)
        if image is not None:
            self._image_by_key.move_to_end(key)
        return image

    def find_key(self, uuid: ImageKey) -> ImageKey | None:
        """Return the key of the image that was sent last with a uuid, if it is still here."""
        key = self._key_by_uuid.get(uuid)
        if key is not None:
            self._key_by_uuid.move_to_end(uuid)
        return key if key in self._image_by_key else None

    def name(self, uuid: ImageKey, key: ImageKey) -> None:
        """Let a uuid stand for an image from now on."""
        self._key_by_uuid[uuid] = key
        self._key_by_uuid.move_to_end(uuid)
        if len(self._key_by_uuid) > MAX_UUIDS:
            self._key_by_uuid.popitem(last=False)

    def add(self, key: ImageKey, image: PreparedImage) -> None:
        """Keep an image, unless two requests have prepared the same one at the same time."""
        if key in self._image_by_key:
            return
        self._image_by_key[key] = image
        self._num_bytes += image.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._image_by_key.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
