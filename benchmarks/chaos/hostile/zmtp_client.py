"""Raw ZMTP client for attacks on KV event sockets: it sends what libzmq would never send."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress

TIMEOUT_S = 5.0
GREETING_BYTES = 64
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
CHUNK = bytes(1 << 16)


class RawZmtpClient:
    """Connection to an endpoint, tcp://HOST:PORT or ipc://PATH, open within a `with` block.

    Methods raise OSError when the other end disconnects or does not answer.
    """

    def __init__(self, endpoint: str) -> None:
        kind, _, address = endpoint.partition("://")
        if kind == "ipc":
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(TIMEOUT_S)
            self.socket.connect(address)
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)

    def __enter__(self) -> RawZmtpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def shake_hands(self, socket_type: bytes) -> None:
        name = b"Socket-Type"
        ready = b"\x05READY" + bytes((len(name),)) + name
        ready += len(socket_type).to_bytes(4, "big") + socket_type
        self.socket.sendall(GREETING + frame(ready, COMMAND))
        left = GREETING_BYTES + 2
        while left:
            received = self.socket.recv(left)
            if not received:
                raise ConnectionResetError("the other end has disconnected")
            left -= len(received)

    def send_long_frame(self, declared_bytes: int, limit_bytes: int) -> int:
        """Send a frame of this length. Return how much of the first `limit_bytes` were taken."""
        return self.send_until_refused(
            [bytes((LONG,)) + declared_bytes.to_bytes(8, "big"), *[CHUNK] * (limit_bytes >> 16)],
            TIMEOUT_S,
        )

    def send_until_refused(self, pieces: Sequence[bytes], limit_s: float) -> int:
        """Send all until the other end disconnects or the time is over.

        Return the number of bytes that were taken.
        """
        num_bytes, end_s = 0, time.monotonic() + limit_s
        with suppress(OSError):
            for piece in pieces:
                if (left_s := end_s - time.monotonic()) <= 0:
                    break
                self.socket.settimeout(left_s)
                self.socket.sendall(piece)
                num_bytes += len(piece)
        return num_bytes


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def subscription(prefix: bytes) -> bytes:
    return frame(b"\x01" + prefix)


def replay_request(first: int) -> bytes:
    return frame(b"", MORE) + frame(first.to_bytes(8, "big"))
