"""Encodings in blocks of the KV cache, where encode nodes write them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.ids import PrefixKeys
from baton.core.media import StoredRows, picture_salt
from baton.engine.kv_arrival.holds import Hold, Holds
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import name_in_group
from baton.engine.kv_cache.cache import KvCache
from baton.engine.plan import EncodingSource, StoredEncoding
from baton.engine.request_media import RequestMedia


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
