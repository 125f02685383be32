"""Listening sockets, with clear errors for addresses that cannot be bound."""

from __future__ import annotations

import errno
import os
import socket
from typing import Annotated

from baton.core.options import NETWORK, Option
from baton.rpc.errors import AddressInUse

MAX_PORT = 65535

ListenHost = Annotated[str, Option("Address to listen on.", NETWORK)]
ListenPort = Annotated[
    int, Option("Port to listen on; 0 takes a free port.", NETWORK, at_least=0, at_most=MAX_PORT)
]


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Raises AddressInUse."""
    listening_socket(host, port, option).close()


def listening_socket(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket. Raises AddressInUse, which names the option to change."""
    try:
        [found, *_] = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        return socket.create_server(found[4][:2], family=found[0])
    except OSError as error:
        raise AddressInUse(_error_message(host, port, option, error)) from error


def _error_message(host: str, port: int, option: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; choose another {option}, or {option} 0 for any"
    number = error.errno or 0
    reason = os.strerror(number) if number > 0 else error.strerror  # the bare reason
    return f"cannot listen on {host}:{port}: {reason}"
