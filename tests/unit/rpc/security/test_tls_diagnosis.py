"""Diagnosis of TLS failures: it leaves no resources behind."""

from __future__ import annotations

import gc
import socket
import struct
import threading
import warnings

from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.security.tls_diagnosis import tls_trouble

NUM_TRIES = 100


def resets(server: socket.socket, num: int) -> None:
    """Reset each connection as soon as it is accepted."""
    for _ in range(num):
        connection, _ = server.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def test_a_peer_that_disconnects_at_once_leaves_no_socket_open() -> None:
    unraised: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server, warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: unraised.append(str(message))
        warnings.simplefilter("always", ResourceWarning)
        thread = threading.Thread(target=resets, args=(server, NUM_TRIES))
        thread.start()

        reported = {
            tls_trouble(f"127.0.0.1:{server.getsockname()[1]}", PLAIN) for _ in range(NUM_TRIES)
        }

        thread.join()
        gc.collect()
    assert reported == {None}
    assert unraised == []


def test_an_unreachable_server_gives_no_tls_diagnosis() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert tls_trouble(f"127.0.0.1:{port}", PLAIN) is None
    assert tls_trouble("no-such-host.invalid:1", PLAIN) is None
    assert tls_trouble("unix:/tmp/no-such-socket", TlsConfig()) is None
