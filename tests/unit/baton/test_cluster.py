"""Ports of the processes of a local cluster."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from baton.cluster.local_cluster import reserved_port


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_servers_alone_can_bind_a_reserved_port(host: str) -> None:
    with reserved_port(host) as reserved, closing(socket.socket(reserved.family)) as other:
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use"):
            other.bind(address)  # as the kernel does when it chooses a port

        for _ in range(2):  # the second one after a restart
            with socket.create_server(address[:2], family=reserved.family) as server:
                socket.create_connection(server.getsockname()[:2]).close()
