"""Router addresses: conversion to gRPC targets, and error texts for failed connections. Pure."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv6Address

from baton.core.errors import InvalidConfig

DEFAULT_PORT = 50051
MAX_PORT = 65535
DNS = re.compile(r"dns:(?://[^/]*/)?")
OTHER_GRPC_TARGETS = ("ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")
HOST = re.compile(r"\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]/:,]+")
ADDRESS_ADVICE = f"write host:port, such as 127.0.0.1:{DEFAULT_PORT}"
# Keys: fragments of gRPC's messages for failed connections.
REASONS = {
    "Domain name not found": "there is no such host",
    "Connection refused": "connection refused",
    "Connection timed out": "connection timed out",
    "Network is unreachable": "the network is unreachable",
    "No route to host": "there is no route to the host",
}
HTTP1_ERROR_FRAGMENT = "http1.x server"


def router_target(written: str) -> str:
    """Return the gRPC target of an address given by a user. Raises InvalidConfig.

    The default port is the router's, whereas gRPC's would be 443.
    """
    address = written.strip()
    if address.startswith(OTHER_GRPC_TARGETS):
        return address
    prefix = DNS.match(address)
    if prefix is not None:
        return prefix[0] + _with_port(address.removeprefix(prefix[0]), written)
    if "://" in address:
        raise InvalidConfig(
            f"address {written!r} is a URL; a router is called over gRPC: {ADDRESS_ADVICE}, "
            "the router's "
            "--port (its --http-port is for OpenAI's clients)"
        )
    return _with_port(address, written)


def unreachable(address: str, details: str) -> str:
    """Return an error text for a failed connection, from gRPC's `details`."""
    if HTTP1_ERROR_FRAGMENT in details:
        return (
            f"{address} speaks HTTP and not gRPC; if it is a router's --http-port, give its --port "
            "(baton up prints both)"
        )
    reason = connection_error(details)
    return f"{address} cannot be reached: {reason}; is a router running there? baton up starts one"


def connection_error(details: str) -> str:
    """Return what failed in words, or gRPC's `details` for other errors."""
    return next((text for fragment, text in REASONS.items() if fragment in details), details)


def is_port(written: str) -> bool:
    return written.isascii() and written.isdigit() and 0 < int(written) <= MAX_PORT


def _with_port(address: str, written: str) -> str:
    if not address:
        raise InvalidConfig(f"address {written!r} is empty; {ADDRESS_ADVICE}")
    if _is_ipv6(address):
        return f"[{address}]:{DEFAULT_PORT}"
    host, port = address, str(DEFAULT_PORT)
    if ":" in address.rpartition("]")[2]:
        host, _, port = address.rpartition(":")
    if not HOST.fullmatch(host):
        raise InvalidConfig(f"address {written!r} has no host, or an invalid one; {ADDRESS_ADVICE}")
    if not is_port(port):
        raise InvalidConfig(f"address {written!r}: its port must be from 1 to {MAX_PORT}")
    return f"{host}:{port}"


def _is_ipv6(address: str) -> bool:
    try:
        IPv6Address(address)
    except AddressValueError:
        return False
    return True
