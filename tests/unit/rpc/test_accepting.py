"""End of accepting connections."""

from __future__ import annotations

import os
import socket
from threading import Event, Thread

from baton.rpc.accepting import shut_port


def test_a_shut_port_refuses_connections_and_ends_those_it_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listening.accept()

            shut_port(port)

            assert client.recv(1) == b""
            accepted.close()
        with socket.socket() as late:
            assert late.connect_ex(("127.0.0.1", port)) != 0


def test_descriptors_that_other_threads_open_and_close_are_no_error() -> None:
    is_over = Event()

    def open_and_close() -> None:
        while not is_over.is_set():
            for end in socket.socketpair():
                end.close()
            os.close(os.open("/dev/null", os.O_RDONLY))

    thread = Thread(target=open_and_close)
    thread.start()
    try:
        for _ in range(100):
            with socket.create_server(("127.0.0.1", 0)) as listening:
                shut_port(listening.getsockname()[1])
    finally:
        is_over.set()
        thread.join()
