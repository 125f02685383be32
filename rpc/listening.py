"""Listening sockets and their connections, whose number the limit of file descriptors bounds."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

from baton.core.options import NETWORK, Option
from baton.rpc.errors import AddressInUse

MAX_PORT = 65535
# Upper bound of the soft limit, above what any Baton process needs, if the hard limit is higher.
MAX_DESCRIPTORS = 1 << 16
# For model files, UCX, traces and connections to nodes.
MIN_RESERVED = 64
RESERVED_SHARE = 4  # one in four of all descriptors
NUM_SERVERS = 2  # gRPC and HTTP
MIN_CONNECTIONS, MAX_CONNECTIONS = 16, 4096


ListenHost = Annotated[str, Option("Address to listen on.", NETWORK)]
ListenPort = Annotated[
    int, Option("Port to listen on; 0 takes a free port.", NETWORK, at_least=0, at_most=MAX_PORT)
]

log = logging.getLogger(__name__)


def check_port(host: str, port: int, option: str = "--port", *, zero: str = "any") -> None:
    """Raises AddressInUse. `zero` is the meaning of port 0."""
    listening_socket(host, port, option, zero).close()


def listening_socket(host: str, port: int, option: str, zero: str = "any") -> socket.socket:
    """Return a listening socket. Raises AddressInUse, which names the option to change."""
    try:
        [found, *_] = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        listening = socket.create_server(found[4][:2], family=found[0])
    except OSError as error:
        raise AddressInUse(_error_message(host, port, option, zero, error)) from error
    # Accepted sockets inherit it. asyncio sets it only where the protocol number is not 0.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


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
        for number in [number for number, is_listening in _sockets_on(port) if is_listening]:
            os.dup2(unused.fileno(), number, inheritable=False)
    for number, _ in list(_sockets_on(port)):
        with socket.socket(fileno=os.dup(number)) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # fails if the client has closed it


def _sockets_on(port: int) -> Iterator[tuple[int, bool]]:
    """Yield the descriptors of this process's TCP sockets on `port`, and whether they listen."""
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # no socket, or closed since it was listed
            found = socket.socket(fileno=number)
            try:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and found.getsockname()[1] == port:
                    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    yield number, bool(listens)
            finally:
                found.detach()


def _error_message(host: str, port: int, option: str, zero: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        advice = f"choose another {option}, or {option} 0 for {zero}"
        return f"port {port} of {host} is in use; {advice}"
    number = error.errno or 0
    reason = os.strerror(number) if number > 0 else error.strerror  # the bare reason
    return f"cannot listen on {host}:{port}: {reason}"


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, up to MAX_DESCRIPTORS. Return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of %d open files stays as it is: %s", soft, error)
    return descriptor_limit()


def descriptor_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def max_connections(num_descriptors: int) -> int:
    """Return the connection limit per server. Both servers together leave a reserve."""
    reserved = max(MIN_RESERVED, num_descriptors // RESERVED_SHARE)
    share = (num_descriptors - reserved) // NUM_SERVERS
    return max(MIN_CONNECTIONS, min(share, MAX_CONNECTIONS))
