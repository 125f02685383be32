"""Begin and end of accepting connections."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress


async def connection_waits(listening: socket.socket) -> None:
    """Wait for a connection without accepting it: a cancelled `sock_accept` may lose one."""
    loop = asyncio.get_running_loop()
    waiting = asyncio.Event()
    loop.add_reader(listening, waiting.set)
    try:
        await waiting.wait()
    finally:
        loop.remove_reader(listening)


def shut_port(port: int) -> None:
    """Stop listening on `port`, and shut down the connections that were accepted there.

    For servers that do not give access to their sockets. Nothing is logged: the descriptor of a
    listening socket becomes that of another one, to which nobody connects.
    """
    with socket.create_server(("127.0.0.1", 0)) as unused:
        unused.setblocking(False)
        for number, found in _sockets_on(port):
            if _listens(found):
                os.dup2(unused.fileno(), number, inheritable=False)
    for _, found in _sockets_on(port):
        with suppress(OSError):  # the client has closed it
            found.shutdown(socket.SHUT_RDWR)


def _sockets_on(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptors of this process's TCP sockets on `port`, each with a duplicate.

    A thread that closes the descriptor meanwhile does not make the duplicate another socket.
    """
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # closed since it was listed
            # The end of a duplicate of a file would release the locks of this process on it.
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and found.getsockname()[1] == port:
                    yield number, found


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
