"""How processes and clients talk gRPC: sizes, keepalive, TLS, and every channel made alike."""

from __future__ import annotations

import grpc
from grpc import aio

from serving.sizes import MAX_MESSAGE_BYTES
from serving.tls import PLAIN, TlsConfig

KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
# A server that is pinged more often than this sends its peer away with `too_many_pings`.
MIN_PING_INTERVAL_MS = KEEPALIVE_MS // 2

Options = tuple[tuple[str, int | str], ...]

COMMON_OPTIONS: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: Options = (
    *COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers on one port would share its connections without anyone noticing.
    ("grpc.so_reuseport", 0),
)
CLIENT_OPTIONS: Options = (
    *COMMON_OPTIONS,
    # A node that comes back on its address is found again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(address: str, tls: TlsConfig = PLAIN) -> aio.Channel:
    """To `host:port` or `dns:///name:port`; that host is what a certificate must carry."""
    credentials = channel_credentials(tls)
    if credentials is None:
        return aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return aio.secure_channel(address, credentials, options=_options(tls))


def open_blocking_channel(address: str, tls: TlsConfig = PLAIN) -> grpc.Channel:
    """The same for callers without an asyncio loop."""
    credentials = channel_credentials(tls)
    if credentials is None:
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    return grpc.secure_channel(address, credentials, options=_options(tls))


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials | None:
    """None: plain text."""
    if tls.cert is None or tls.key is None:
        return None
    pairs = [(tls.key.read_bytes(), tls.cert.read_bytes())]
    if tls.client_ca is None:
        return grpc.ssl_server_credentials(pairs)
    return grpc.ssl_server_credentials(pairs, tls.client_ca.read_bytes(), require_client_auth=True)


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials | None:
    """None: plain text."""
    if tls.ca is None:
        return None
    if tls.cert is None or tls.key is None:
        return grpc.ssl_channel_credentials(tls.ca.read_bytes())
    return grpc.ssl_channel_credentials(
        tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
    )


def _options(tls: TlsConfig) -> Options:
    if not tls.server_name:
        return CLIENT_OPTIONS
    return (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))
