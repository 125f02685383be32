"""The pictures of one request. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.media import MediaSegment, Picture, PictureRows, encoding_rows
from baton.core.request import EngineRequest, TaskOutput
from baton.engine.plan import EncodingSource


@dataclass(frozen=True, slots=True)
class RequestMedia:
    segments: tuple[MediaSegment, ...]  # in order
    # By digest: pixels, and while the request runs, encodings in the KV cache.
    sources: dict[bytes, EncodingSource]
    num_rows: dict[bytes, int]  # of each encoding
    cache_salt: str = ""

    @classmethod
    def of(cls, request: EngineRequest, picture_rows: PictureRows | None = None) -> RequestMedia:
        sources: dict[bytes, EncodingSource] = {each.digest: each for each in request.pictures}
        num_rows = encoding_rows(request.media)
        if request.task.output is TaskOutput.ENCODING and picture_rows is not None:
            # Its tokens are those of blocks, which hold more rows than tokens.
            for picture in request.pictures:
                num_rows[picture.digest] = picture_rows(picture.height, picture.width)
        return cls(request.media, sources, num_rows, request.cache_salt)

    @property
    def end(self) -> int:
        """Position after the last token of a picture."""
        last = self.segments[-1]
        return last.start + last.num_tokens

    def within(self, start: int, end: int) -> Iterator[MediaSegment]:
        """Yield the segments that have a token from `start` up to `end`."""
        return (segment for segment in self.segments if segment.overlaps(start, end))

    def cut_at(self, place: int) -> MediaSegment | None:
        """Return the segment that `place` divides, if it is inside of one."""
        found = self.within(place, place + 1)
        return next((segment for segment in found if segment.start < place), None)

    def forget_stored(self) -> None:
        """Forget the encodings in the KV cache: without a hold, they may go."""
        for digest in [key for key, each in self.sources.items() if not isinstance(each, Picture)]:
            del self.sources[digest]

    def lacking(self, start: int) -> list[bytes]:
        """Return the pictures from token `start` on of which nothing is here to encode."""
        digests = (
            segment.digest
            for segment in self.segments
            if segment.start + segment.num_tokens > start
        )
        return [digest for digest in dict.fromkeys(digests) if digest not in self.sources]
