"""The pictures of one request. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.media import MediaSegment, Picture
from baton.core.request import EngineRequest


@dataclass(frozen=True, slots=True)
class RequestMedia:
    segments: tuple[MediaSegment, ...]  # in order
    pictures: dict[bytes, Picture]  # by digest; empty where no pixels are needed
    num_rows: dict[bytes, int] = field(default_factory=dict)  # of each encoding

    @classmethod
    def of(cls, request: EngineRequest) -> RequestMedia:
        media = cls(request.media, {each.digest: each for each in request.pictures})
        for segment in request.media:
            known = media.num_rows.get(segment.digest, 0)
            media.num_rows[segment.digest] = max(known, segment.first + segment.num_tokens)
        return media

    def within(self, start: int, end: int) -> Iterator[MediaSegment]:
        """Yield the segments that have a token from `start` up to `end`."""
        return (segment for segment in self.segments if segment.overlaps(start, end))

    def cut_at(self, place: int) -> MediaSegment | None:
        """Return the segment that `place` divides, if it is inside of one."""
        found = self.within(place, place + 1)
        return next((segment for segment in found if segment.start < place), None)

    def lacks_pixels(self, start: int) -> bool:
        """Return whether a picture from token `start` on has no pixels here."""
        return any(
            segment.digest not in self.pictures
            for segment in self.segments
            if segment.start + segment.num_tokens > start
        )
