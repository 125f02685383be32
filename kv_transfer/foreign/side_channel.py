"""Client of the side channel on which a vLLM server tells how to reach its KV. Never blocks."""

from __future__ import annotations

import zmq

from baton.kv_transfer.foreign.metadata import MAX_REPLY_BYTES, metadata_request


class SideChannel:
    """One request for a server's metadata."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> None:
        """Connect and send the request. Raises zmq.ZMQError for an address that cannot be used."""
        self.socket = context.socket(zmq.REQ)
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            self.socket.setsockopt(zmq.IPV6, int(":" in host))
            self.socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            self.socket.send(metadata_request(), zmq.DONTWAIT)
        except zmq.ZMQError:
            self.close()
            raise

    def take_reply(self) -> list[bytes] | None:
        """Return the reply, or None while there is none."""
        try:
            return self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close(linger=0)
