"""Free ports for programs that cannot choose one themselves."""

from __future__ import annotations

import socket


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
