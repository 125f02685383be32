"""Listening sockets, and the limit of file descriptors, which bounds their connections."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
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
