"""Plans which pictures a step encodes, and cuts prompts before those it cannot. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from baton.core.ids import RequestId
from baton.core.media import Picture
from baton.engine.errors import EncodingsUnaccounted
from baton.engine.kv_arrival.holds import Hold
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.media.encoder_cache import EncoderCache
from baton.engine.media.stored_encodings import StoredEncodings, num_stored_blocks
from baton.engine.plan import NO_MEDIA, EncodingSource, MediaOrders
from baton.engine.request_media import RequestMedia


@dataclass(slots=True, eq=False)
class _User:
    """A request that computes tokens of pictures."""

    kv: HeldKv
    media: RequestMedia
    # By digest: the length of the request after which it needs the encoding no more.
    needs: dict[bytes, int] = field(default_factory=dict)
    hold: Hold | None = None  # on blocks with encodings that it has no pixels for


class MediaPlanner:
    """Implements `MediaPlans`: keeps the encoder cache, and limits the rows of a step."""

    def __init__(
        self,
        num_cache_rows: int,
        max_rows_per_step: int,
        stored: StoredEncodings,
        *,
        whole_pictures: bool = False,
    ) -> None:
        """With `whole_pictures`, all tokens of a picture are computed in one step."""
        self.cache = EncoderCache(num_cache_rows)
        self._stored = stored
        self._max_rows_per_step = max_rows_per_step
        self._whole_pictures = whole_pictures
        self._num_step_rows = 0
        self._users: dict[RequestId, _User] = {}
        self._new: dict[bytes, EncodingSource] = {}  # that the next plan encodes
        self._orders: dict[RequestId, tuple[EncodingSource, ...]] = {}
        # For each plan whose pass has not ended: the blocks that it reads, also if their request
        # ends before.
        self._reading: deque[Hold | None] = deque()
        self._total_encoded = 0
        self._total_read = 0

    def begin_step(self) -> None:
        self._num_step_rows = 0
        for user in self._users.values():
            if user.hold is not None and user.kv.num_computed_tokens >= user.media.end:
                self._close_hold(user)

    def can_encode(self, media: RequestMedia, start: int, num_blocks: int) -> bool:
        found = self._stored.find(media, media.lacking(start))
        return found is not None and num_stored_blocks(found.values()) <= num_blocks

    def hold(self, kv: HeldKv, media: RequestMedia, start: int) -> None:
        found = self._stored.find(media, media.lacking(start))
        if found:
            media.sources.update(found)
            self._users[kv.request_id] = _User(kv, media, hold=self._stored.hold(found.values()))

    def begin_whole(self, media: RequestMedia, start: int) -> int:
        cut = media.cut_at(start) if self._whole_pictures else None
        return start if cut is None else cut.start

    def limit(self, media: RequestMedia, start: int, num_tokens: int, num_left: int) -> int:
        if self._whole_pictures:
            num_tokens = _without_parts(media, start, num_tokens, num_left)
        used, added, num_rows = self._used(), dict[bytes, int](), self._num_step_rows
        for segment in media.within(start, start + num_tokens):
            digest = segment.digest
            if digest not in self.cache and digest not in added:
                added[digest] = media.num_rows[digest]
                num_rows += added[digest]
            used.add(digest)
            is_over = num_rows > self._max_rows_per_step and num_rows != added.get(digest)
            if (digest in added and is_over) or not self.cache.has_room(added, used):
                return max(0, segment.start - start)
        return num_tokens

    def use(self, kv: HeldKv, media: RequestMedia, start: int, num_tokens: int) -> None:
        segments = [*media.within(start, start + num_tokens)]
        if not segments:
            return
        needs = self._users.setdefault(kv.request_id, _User(kv, media)).needs
        found = {segment.digest for segment in segments if segment.digest not in needs}
        for segment in segments:  # before any is encoded, in place of others
            end = segment.start + segment.num_tokens
            needs[segment.digest] = max(needs.get(segment.digest, 0), end)
        for segment in segments:
            digest = segment.digest
            if digest not in self.cache:
                self._encode(media.sources[digest], media.num_rows[digest])
            elif digest in found and digest not in self._new:
                self.cache.touch(digest)
            found.discard(digest)
        pictures = (self._new.get(segment.digest) for segment in segments)
        ordered = dict.fromkeys(each.digest for each in pictures if each is not None)
        if ordered:
            earlier = (each.digest for each in self._orders.get(kv.request_id, ()))
            digests = dict.fromkeys((*earlier, *ordered))
            self._orders[kv.request_id] = tuple(self._new[digest] for digest in digests)

    def _encode(self, source: EncodingSource, num_rows: int) -> None:
        self.cache.add(source.digest, num_rows, self._used())
        self._num_step_rows += num_rows
        self._new[source.digest] = source
        is_encoded = isinstance(source, Picture)
        self._total_encoded += is_encoded
        self._total_read += not is_encoded

    def release(self, request_id: RequestId) -> None:
        user = self._users.pop(request_id, None)
        if user is not None:
            self._close_hold(user)

    def _close_hold(self, user: _User) -> None:
        if user.hold is not None:
            self._stored.close(user.hold)
            user.hold = None
            user.media.forget_stored()

    def drop(self, media: RequestMedia) -> None:
        self._stored.forget(media)
        for digest in media.num_rows:
            self.cache.drop(digest)
            for user in self._users.values():
                user.needs.pop(digest, None)

    def reset(self) -> None:
        self.cache.clear(self._used())

    def take_orders(self) -> MediaOrders:
        freed = self.cache.take_freed()
        read = [each for each in self._new.values() if not isinstance(each, Picture)]
        self._reading.append(self._stored.hold(read) if read else None)
        if not freed and not self._orders:
            return NO_MEDIA
        orders = MediaOrders(freed, self._orders)
        self._orders, self._new = {}, {}
        return orders

    def end_pass(self) -> None:
        hold = self._reading.popleft()
        if hold is not None:
            self._stored.close(hold)

    def stats(self) -> dict[str, int]:
        return {
            "num_encoder_rows": self.cache.num_used_rows,
            "max_encoder_rows": self.cache.num_rows,
            "total_encoded_pictures": self._total_encoded,
            "total_read_pictures": self._total_read,
            "total_found_pictures": self.cache.total_hits,
        }

    def check(self, running: Collection[RequestId]) -> None:
        self.cache.check(self._used())
        gone = self._users.keys() - running
        if gone:
            raise EncodingsUnaccounted(f"{sorted(gone)} use encodings, but do not run")

    def _used(self) -> set[bytes]:
        used = set[bytes]()
        for user in self._users.values():
            computed = user.kv.num_computed_tokens
            user.needs = {key: end for key, end in user.needs.items() if end > computed}
            used.update(user.needs)
        return used


def _without_parts(media: RequestMedia, start: int, num_tokens: int, num_left: int) -> int:
    """Return the size of a chunk that computes all of the picture at its end, or nothing of it."""
    cut = media.cut_at(start + num_tokens) if num_tokens else None
    if cut is None:
        return num_tokens
    if cut.start > start:
        return cut.start - start
    return cut.num_tokens if cut.num_tokens <= num_left else 0
