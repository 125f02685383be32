"""Listening sockets, and the limit on file descriptors: servers leave a reserve."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from baton.rpc.listening import (
    MIN_CONNECTIONS,
    MIN_RESERVED,
    NUM_SERVERS,
    listening_socket,
    max_connections,
)

RAISED = """\
import resource
from baton.rpc.listening import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
assert raise_descriptor_limit() == 200
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 200)
"""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    subprocess.run([sys.executable, "-c", RAISED], check=True)


@pytest.mark.parametrize("num_descriptors", [256, 1024, 4096, 1 << 20])
def test_all_servers_together_leave_a_reserve_of_descriptors(num_descriptors: int) -> None:
    share = max_connections(num_descriptors)

    assert share >= MIN_CONNECTIONS
    assert NUM_SERVERS * share + MIN_RESERVED <= num_descriptors


def test_accepted_connections_send_at_once() -> None:
    with listening_socket("127.0.0.1", 0, "--port") as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
