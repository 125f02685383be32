"""gRPC channels and server options: message sizes, keepalive, reconnection, TLS."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc import aio

from baton.rpc.listening import descriptor_limit, max_connections
from baton.rpc.messages.limits import MAX_MESSAGE_BYTES
from baton.rpc.security.tls import PLAIN, TlsConfig

Options = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """HTTP/2 pings on connections with calls. Both sides detect a silently broken connection."""

    every_s: float = 10.0
    patience_s: float = 10.0  # timeout of a ping's acknowledgement, long enough for a busy machine

    @property
    def options(self) -> Options:
        return (
            ("grpc.keepalive_time_ms", round(self.every_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.patience_s * 1000)),
            # gRPC 1.85 uses this option. Without it, the timeout of a lost ping is one minute.
            ("grpc.http2.ping_timeout_ms", round(self.patience_s * 1000)),
            # No data is sent while a call waits for its next token.
            ("grpc.http2.max_pings_without_data", 0),
        )

    @property
    def server_options(self) -> Options:
        """Options that close clients which ping more than twice as often, by `too_many_pings`."""
        return (
            *self.options,
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.every_s * 500)),
            ("grpc.keepalive_permit_without_calls", 1),
        )


KEEPALIVE = Keepalive()
SIZES: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


@dataclass(frozen=True, slots=True)
class ServerConnections:
    """Limits of a server's connections: their number, handshake time and idle time."""

    max_connections: int | None = None  # None: derived from the limit of file descriptors
    handshake_s: float = 10.0  # timeout of the HTTP/2 handshake
    idle_s: float = 75.0  # without calls; clients reconnect when they need to

    @property
    def options(self) -> Options:
        limit = self.max_connections or max_connections(descriptor_limit())
        return (
            ("grpc.max_allowed_incoming_connections", limit),
            ("grpc.server_handshake_timeout_ms", round(self.handshake_s * 1000)),
            ("grpc.max_connection_idle_ms", round(self.idle_s * 1000)),
        )


CONNECTIONS = ServerConnections()
# Bounds the time until a node that restarts on the same address is reachable again.
MAX_RECONNECT_S = 2.0
RECONNECTION: Options = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", round(MAX_RECONNECT_S * 1000)),
)


def server_options(
    keepalive: Keepalive = KEEPALIVE,
    connections: ServerConnections = CONNECTIONS,
    max_request_bytes: int = MAX_MESSAGE_BYTES,
) -> Options:
    return (
        SIZES[0],
        ("grpc.max_receive_message_length", max_request_bytes),
        *keepalive.server_options,
        # With SO_REUSEPORT, two servers on one port would share its connections unnoticed.
        ("grpc.so_reuseport", 0),
        *connections.options,
    )


def open_channel(
    address: str, tls: TlsConfig = PLAIN, keepalive: Keepalive = KEEPALIVE
) -> aio.Channel:
    """Open a channel to `host:port` or `dns:///name:port`. The certificate must name that host."""
    credentials = channel_credentials(tls)
    if credentials is None:
        return aio.insecure_channel(address, options=_options(tls, keepalive))
    return aio.secure_channel(address, credentials, options=_options(tls, keepalive))


def open_blocking_channel(address: str, tls: TlsConfig = PLAIN) -> grpc.Channel:
    """Like `open_channel`, for callers without an asyncio loop."""
    credentials = channel_credentials(tls)
    if credentials is None:
        return grpc.insecure_channel(address, options=_options(tls))
    return grpc.secure_channel(address, credentials, options=_options(tls))


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials | None:
    """Return a client's TLS credentials, or None for plain text."""
    if tls.ca is None:
        return None
    if tls.cert is None or tls.key is None:
        return grpc.ssl_channel_credentials(tls.pem(tls.ca))
    return grpc.ssl_channel_credentials(tls.pem(tls.ca), tls.pem(tls.key), tls.pem(tls.cert))


def _options(tls: TlsConfig, keepalive: Keepalive = KEEPALIVE) -> Options:
    options = (*SIZES, *keepalive.options, *RECONNECTION)
    if not tls.server_name:
        return options
    return (*options, ("grpc.ssl_target_name_override", tls.server_name))
