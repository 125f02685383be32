"""Resolves the sources of nodes periodically, without blocking the event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from baton.core.errors import InvalidConfig
from baton.router.discovery.sources import (
    DnsName,
    FixedNode,
    ListFile,
    NodeSource,
    join_address,
    parse_list,
)
from baton.rpc.errors import ServiceError

log = logging.getLogger(__name__)

# Time until a list without nodes is read again: a cluster writes it while it starts.
EMPTY_LIST_S = 0.1
# Returns the current addresses of a source. Raises SourceFailed.
Find = Callable[[NodeSource], Awaitable[frozenset[str]]]
OnFound = Callable[[NodeSource, frozenset[str]], Awaitable[None]]


class SourceFailed(ServiceError):
    """A source of nodes could not be resolved. The nodes known from it are kept."""


async def follow(source: NodeSource, find: Find, every_s: float, on_found: OnFound) -> None:
    """Call `on_found` when the addresses of a source change. Failures change nothing."""
    known: frozenset[str] | None = None
    trouble = ""
    while True:
        try:
            found = await find(source)
        except SourceFailed as failure:
            if str(failure) != trouble:
                trouble = str(failure)
                log.warning("%s; the nodes known from it are kept", trouble)
        else:
            trouble = ""
            if found != known:
                log.info("%s names %s", source, ", ".join(sorted(found)) or "no node")
                known = found
                await on_found(source, found)
        if isinstance(source, FixedNode):
            return
        is_awaited = isinstance(source, ListFile) and not known
        await asyncio.sleep(min(every_s, EMPTY_LIST_S) if is_awaited else every_s)


async def find_addresses(source: NodeSource) -> frozenset[str]:
    """Return the current addresses of a source. Raises SourceFailed."""
    match source:
        case FixedNode(address):
            return frozenset({address})
        case DnsName(host, port):
            return await _run_in_thread(lambda: _resolve(host, port))
        case ListFile(path):
            return await _run_in_thread(lambda: _read_list(path))


def _resolve(host: str, port: int) -> frozenset[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SourceFailed(f"the name {host} could not be resolved: {error}") from error
    return frozenset(join_address(str(address[0]), port) for *_, address in found)


def _read_list(path: str) -> frozenset[str]:
    try:
        return parse_list(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise SourceFailed(f"the node list {path} could not be read: {error}") from error
    except InvalidConfig as error:
        raise SourceFailed(f"the node list {path}: {error}") from error


async def _run_in_thread(call: Callable[[], frozenset[str]]) -> frozenset[str]:
    """Run `call` in a separate thread that does not delay the end of the process.

    The system's resolver cannot be cancelled, and takes half a minute if the name server is down.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[frozenset[str]] = loop.create_future()

    def run() -> None:
        try:
            deliver = partial(result.set_result, call())
        except Exception as error:  # noqa: BLE001 - raised again by the awaiting task
            deliver = partial(result.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(lambda: None if result.done() else deliver())

    threading.Thread(target=run, name="find nodes", daemon=True).start()
    return await result
