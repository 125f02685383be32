"""The border to object stores: a Protocol, and a bucket of S3 or a compatible store.

The only module that imports obstore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import urlsplit

from baton.core.errors import InvalidConfig

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Store

CONNECT_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 5.0  # from the first byte sent to the last received
MAX_RETRIES = 2
RETRY_TIMEOUT_S = 2.0  # a request that has taken longer is not repeated
PAGE_OBJECTS = 1000
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    num_bytes: int
    changed_s: float  # seconds since the epoch, by the store's clock
    version: str  # another one after each write


class Objects(Protocol):
    """An object store. Thread-safe. Each call ends within a deadline, or raises OSError."""

    def get(self, key: str, max_bytes: int) -> memoryview | None:
        """Return the bytes of an object; None, unread, if there are more than `max_bytes`.

        Raises FileNotFoundError if there is no object.
        """
        ...

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write an object from its parts, as a whole."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. One that is not there is no error."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[list[ObjectInfo]]:
        """Return the objects under a prefix, page by page, in the order of their keys.

        The prefix ends with a slash. Only keys greater than `after` are returned.
        """
        ...


class S3Objects:
    """Implements Objects. Region, endpoint and credentials come from the AWS_* variables."""

    def __init__(self, store: S3Store) -> None:
        self._store = store

    def get(self, key: str, max_bytes: int) -> memoryview | None:
        return _call(lambda: self._get(key, max_bytes))

    def _get(self, key: str, max_bytes: int) -> memoryview | None:
        found = self._store.get(key)
        return memoryview(found.bytes()) if found.meta["size"] <= max_bytes else None

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        _call(lambda: self._store.put(key, list(parts), use_multipart=False))

    def delete(self, keys: Sequence[str]) -> None:
        with suppress(FileNotFoundError):
            _call(lambda: self._store.delete(list(keys)))

    def list(self, prefix: str, after: str = "") -> Iterator[list[ObjectInfo]]:
        offset = after or None
        pages = _call(lambda: self._store.list(prefix, offset=offset, chunk_size=PAGE_OBJECTS))
        while (page := _call(lambda: next(pages, None))) is not None:
            yield [
                ObjectInfo(
                    key=each["path"],
                    num_bytes=each["size"],
                    changed_s=each["last_modified"].timestamp(),
                    version=each["e_tag"] or each["last_modified"].isoformat(),
                )
                for each in page
            ]


def open_bucket(url: str, request_timeout_s: float = REQUEST_TIMEOUT_S) -> S3Objects:
    """Open `s3://bucket/prefix`. Raises InvalidConfig if that cannot work."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise InvalidConfig(f"--kv-object-store {url}: give it as s3://bucket/prefix")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise InvalidConfig(
            "--kv-object-store needs the package obstore: pip install 'baton[s3]'"
        ) from error
    endpoint = next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), "")
    try:
        store = S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options=_client_options(endpoint, request_timeout_s),
            retry_config=_retries(),
            config={"endpoint": endpoint} if endpoint else {},
        )
    except (BaseError, ValueError) as error:
        raise InvalidConfig(f"--kv-object-store {url}: {_first_line(error)}") from error
    return S3Objects(store)


def _client_options(endpoint: str, request_timeout_s: float) -> ClientConfig:
    return {
        "timeout": timedelta(seconds=request_timeout_s),
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, request_timeout_s)),
        "allow_http": endpoint.startswith("http://"),
    }


def _retries() -> RetryConfig:
    """Return settings for a store that is briefly too busy. One that is gone must fail soon."""
    return {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(milliseconds=500),
            "base": 2,
        },
    }


def _call(request: Callable[[], Result]) -> Result:
    """Carry out a request; its errors become OSError or FileNotFoundError."""
    from obstore.exceptions import BaseError

    try:
        return request()
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        raise OSError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    """Return the message without the library's debugging output."""
    return str(error).partition("\n")[0]
