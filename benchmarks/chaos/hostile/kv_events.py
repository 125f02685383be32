"""Attack on the KV event sockets of nodes: long frames, many subscriptions, endless messages,
replay clients that never read, and connections without a handshake.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import cycle

from benchmarks.chaos.hostile.zmtp_client import (
    MORE,
    RawZmtpClient,
    frame,
    replay_request,
    subscription,
)

NUM_SLOW, NUM_SILENT = 30, 300
SENT_BYTES = 8 << 20
DECLARED_BYTES = 6 << 30
PIECE_BYTES = 2000
HOLD_S = 2.0
MAX_WAIT_S = 0.5  # for all to be taken

Attempt = Callable[[ExitStack], str]


def attack_kv_events(
    endpoints: Sequence[str], replay_endpoints: Sequence[str], end_s: float
) -> Counter[str]:
    """Attack all endpoints in turn, then hold the connections. Return the outcomes."""
    outcomes: Counter[str] = Counter()
    with ExitStack() as connections:
        attempts = [
            *(_sending(each, b"SUB", _subscriptions()) for each in endpoints),
            *(_sending(each, b"DEALER", _endless_message()) for each in replay_endpoints),
            *(_long_frame(each, kind) for each, kind in _with_kinds(endpoints, replay_endpoints)),
            *(_never_reading(each) for each in replay_endpoints for _ in range(NUM_SLOW)),
            *(_silent(each) for each in (*endpoints, *replay_endpoints) for _ in range(NUM_SILENT)),
        ]
        for attempt in attempts:
            if time.monotonic() > end_s:
                outcomes["not sent"] += 1
                continue
            try:
                outcomes[attempt(connections)] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1
        time.sleep(max(0.0, min(HOLD_S, end_s - time.monotonic())))
    return outcomes


def _with_kinds(
    endpoints: Sequence[str], replay_endpoints: Sequence[str]
) -> list[tuple[str, bytes]]:
    return [*zip(endpoints, cycle([b"SUB"])), *zip(replay_endpoints, cycle([b"DEALER"]))]


def _connected(endpoint: str, kind: bytes, connections: ExitStack) -> RawZmtpClient:
    client = connections.enter_context(RawZmtpClient(endpoint))
    client.shake_hands(kind)
    return client


def _sending(endpoint: str, kind: bytes, pieces: list[bytes]) -> Attempt:
    def attempt(connections: ExitStack) -> str:
        sent = _connected(endpoint, kind, connections).send_until_refused(pieces, MAX_WAIT_S)
        return "all was taken" if sent >= SENT_BYTES else "was slowed down or cut off"

    return attempt


def _long_frame(endpoint: str, kind: bytes) -> Attempt:
    def attempt(connections: ExitStack) -> str:
        client = _connected(endpoint, kind, connections)
        sent = client.send_long_frame(DECLARED_BYTES, SENT_BYTES)
        return "a long frame was taken" if sent >= SENT_BYTES else "a long frame was cut off"

    return attempt


def _never_reading(endpoint: str) -> Attempt:
    def attempt(connections: ExitStack) -> str:
        client = _connected(endpoint, b"DEALER", connections)
        client.socket.sendall(replay_request(0) * 4)
        return "asked for replays"

    return attempt


def _silent(endpoint: str) -> Attempt:
    def attempt(connections: ExitStack) -> str:
        connections.enter_context(RawZmtpClient(endpoint))
        return "opened"

    return attempt


def _subscriptions() -> list[bytes]:
    count = SENT_BYTES // PIECE_BYTES + 1
    return [subscription(b"%d" % number + b"x" * PIECE_BYTES) for number in range(count)]


def _endless_message() -> list[bytes]:
    return [frame(b"x" * PIECE_BYTES, MORE)] * (SENT_BYTES // PIECE_BYTES + 1)
