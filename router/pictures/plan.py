"""Values of a prepared image: how its file becomes pictures, and the text in its place. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.core.media import NUM_CHANNELS, Picture


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
