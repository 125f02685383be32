"""Plans which pictures a step encodes, and cuts prompts before those it cannot. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from baton.core.ids import PrefixKeys, RequestId
from baton.core.media import Picture, StoredRows, picture_salt
from baton.engine.errors import EncodingsUnaccounted, OutOfOrder
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import name_in_group
from baton.engine.kv_cache.block_pool import Hold, Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.plan import NO_MEDIA, EncodingSource, MediaOrders, StoredEncoding
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


class EncoderCache:
    """Digests of encodings, with their sizes in rows: one for each placeholder token.

    Its size is limited. An encoding that no request uses stays until another needs its room; the
    one that was used least recently goes first.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_used_rows = 0
        self.total_hits = 0
        self._rows: dict[bytes, int] = {}  # the least recently used first
        self._freed: list[bytes] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def has_room(self, added: Mapping[bytes, int], used: Collection[bytes]) -> bool:
        """Return whether these fit, if all others but the `used` ones go."""
        num_kept = sum(self._rows[digest] for digest in used if digest in self._rows)
        return num_kept + sum(added.values()) <= self.num_rows

    def add(self, digest: bytes, num_rows: int, used: Collection[bytes]) -> None:
        """Add an encoding for which there is room, in place of others that are not `used`."""
        for other in [each for each in self._rows if each not in used]:
            if self.num_used_rows + num_rows <= self.num_rows:
                break
            self.drop(other)
        if self.num_used_rows + num_rows > self.num_rows:
            raise OutOfOrder(f"there is no room for an encoding of {num_rows} rows")
        self._rows[digest] = num_rows
        self.num_used_rows += num_rows

    def touch(self, digest: bytes) -> None:
        """Note the use of an encoding by one more request."""
        self._rows[digest] = self._rows.pop(digest)
        self.total_hits += 1

    def drop(self, digest: bytes) -> None:
        """Remove an encoding, if it is here."""
        num_rows = self._rows.pop(digest, None)
        if num_rows is not None:
            self.num_used_rows -= num_rows
            self._freed.append(digest)

    def clear(self, used: Collection[bytes]) -> None:
        """Remove all encodings that are not `used`."""
        for digest in [each for each in self._rows if each not in used]:
            self.drop(digest)

    def take_freed(self) -> tuple[bytes, ...]:
        """Return the encodings that the runner can forget, since the last call."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def check(self, used: Collection[bytes]) -> None:
        """Raise EncodingsUnaccounted unless the sizes add up and all `used` ones are here."""
        num_rows = sum(self._rows.values())
        if num_rows != self.num_used_rows or num_rows > self.num_rows:
            raise EncodingsUnaccounted(
                f"encodings of {num_rows} rows; {self.num_used_rows} are counted, and "
                f"{self.num_rows} fit"
            )
        missing = [digest for digest in used if digest not in self._rows]
        if missing:
            raise EncodingsUnaccounted(f"{len(missing)} encodings in use are not in the cache")


def num_stored_blocks(sources: Iterable[EncodingSource]) -> int:
    """Return the blocks of encodings in the KV cache."""
    return sum(len(each.block_ids) for each in sources if isinstance(each, StoredEncoding))


class StoredEncodings:
    """Finds the blocks of encodings by name, and holds them for requests that use them."""

    def __init__(self, cache: KvCache, holds: Holds, rows: StoredRows | None) -> None:
        """Without `rows`, the cache stores no encodings."""
        self._cache = cache
        self._holds = holds
        self._rows = rows

    def find(
        self, media: RequestMedia, digests: Iterable[bytes]
    ) -> dict[bytes, EncodingSource] | None:
        """Return where these encodings are; None if one of them is missing."""
        found: dict[bytes, EncodingSource] = {}
        for digest in digests:
            names, num_rows = self._names(media, digest), media.num_rows[digest]
            block_ids = self._cache.pool.find(names)
            if not names or len(block_ids) < len(names):
                return None
            found[digest] = StoredEncoding(digest, num_rows, tuple(block_ids))
        return found

    def hold(self, sources: Iterable[EncodingSource]) -> Hold:
        """Keep these encodings until `close`."""
        stored = (each for each in sources if isinstance(each, StoredEncoding))
        return self._holds.open(block_id for each in stored for block_id in each.block_ids)

    def close(self, hold: Hold) -> None:
        self._holds.close(hold)

    def forget(self, media: RequestMedia) -> None:
        """Remove the encodings of a request from the cache, since they may be wrong."""
        for digest in media.num_rows:
            found = self._cache.pool.find(self._names(media, digest))
            self._cache.prefixes.unregister(found)

    def _names(self, media: RequestMedia, digest: bytes) -> list[BlockHash]:
        if self._rows is None:
            return []
        prompt = self._rows.prompt(digest, media.num_rows[digest])
        keys = PrefixKeys(picture_salt(media.cache_salt), media=prompt.media)
        num_cached, num_tokens = prompt.num_cached_tokens, len(prompt.token_ids)
        names = self._cache.naming.names(prompt.token_ids[:num_cached], num_tokens, keys)
        return [name_in_group(name, self._rows.group) for name in names]
