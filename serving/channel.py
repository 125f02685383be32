"""How the processes of a cluster talk gRPC: sizes, keepalive, and channels made alike."""

from __future__ import annotations

from grpc import aio

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers on one port would share its connections without anyone noticing.
    ("grpc.so_reuseport", 0),
)
CLIENT_OPTIONS = (
    *COMMON_OPTIONS,
    # A node that comes back on its address is found again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(address: str) -> aio.Channel:
    return aio.insecure_channel(address, options=CLIENT_OPTIONS)
