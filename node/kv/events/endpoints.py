"""Sockets of the endpoints of KV events: tcp://HOST:PORT and ipc://PATH."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.core.errors import InvalidConfig
from baton.node.kv.events.config import IPC, TCP, WILDCARD

# Connections that wait to be accepted.
BACKLOG = 128
# A peer whose machine is gone is noticed after about so long.
KEEPALIVE_S, KEEPALIVE_PROBES = 20, 3


@contextmanager
def listen(option: str, endpoint: str, host: str) -> Iterator[socket.socket]:
    """Listen on the endpoint that `option` names. `host` is what `*` stands for.

    Raises InvalidConfig if the endpoint cannot be used.
    """
    path = endpoint.removeprefix(IPC) if endpoint.startswith(IPC) else None
    try:
        if path is not None:
            listening = _listen_on_path(path)
        else:
            named, port = host_and_port(endpoint)
            listening = _listen_on_port(host.strip("[]") if named == WILDCARD else named, port)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"{option} {endpoint}: {reason}") from error
    listening.setblocking(False)
    try:
        yield listening
    finally:
        listening.close()
        if path is not None and not path.startswith("@"):
            Path(path).unlink(missing_ok=True)


def check_target(option: str, endpoint: str) -> None:
    """Raise InvalidConfig for an endpoint that nobody can connect to."""
    try:
        host_and_port(endpoint)
    except ValueError as error:
        raise InvalidConfig(f"{option} {endpoint}: {error}") from error


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Raises ValueError if there is no port."""
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError("write it like tcp://HOST:PORT")
    return host.strip("[]"), int(port)


def keep_alive(connection: socket.socket) -> None:
    """Let the system end the connection when the peer's machine is gone."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", KEEPALIVE_S * KEEPALIVE_PROBES * 1000),
    ):
        if (number := getattr(socket, option, None)) is not None:  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


def _listen_on_port(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def _listen_on_path(path: str) -> socket.socket:
    """A path that begins with `@` is a name in Linux's abstract namespace, as for libzmq."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.startswith("@"):
            listening.bind("\0" + path[1:])
        else:
            with suppress(FileNotFoundError):  # of a process that was killed
                if stat.S_ISSOCK(os.stat(path).st_mode):
                    os.unlink(path)
            listening.bind(path)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening
