"""Free ports for programs that cannot choose one themselves."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

# Below the ports that the kernel gives to connections: one of these could take a port between its
# choice and its use.
PORTS = range(20_000, 32_768)


def free_port() -> int:
    for port in SystemRandom().sample(PORTS, 100):
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")
