"""Polling interval of the KV worker. Pure: the time is an argument."""

from __future__ import annotations

from baton.kv_transfer.config import KvWorkerConfig
from baton.kv_transfer.protocol.incoming import IncomingState
from baton.kv_transfer.protocol.receiver import Receiver
from baton.kv_transfer.protocol.sender import Sender


class PollInterval:
    def __init__(self, config: KvWorkerConfig, receiver: Receiver, sender: Sender) -> None:
        self._config = config
        self._receiver = receiver
        self._sender = sender
        self._bursts_until_s = self._lingers_until_s = self._ticked_s = float("-inf")

    def burst(self, now: float) -> None:
        """Poll at the burst interval for `burst_s`: a transfer has begun or is about to."""
        self._bursts_until_s = now + self._config.burst_s

    def linger(self, now: float) -> None:
        """Keep polling for `linger_s`, to flush the last message of a hand-off."""
        self._lingers_until_s = now + self._config.linger_s

    def is_tick_due(self, now: float) -> bool:
        """Return True once per `tick_s`, when deadlines must be checked."""
        if now < self._ticked_s + self._config.tick_s:
            return False
        self._ticked_s = now
        return True

    def next_poll_s(self, now: float) -> float | None:
        """Return the delay until the next poll; None: only after the next message."""
        incoming = list(self._receiver.incoming())
        is_granted = any(one.state is not IncomingState.WAITING for one in incoming)
        if now < self._bursts_until_s and (is_granted or self._sender.has_flights):
            return self._config.burst_poll_s
        is_writing = self._sender.has_flights or any(one.is_writing for one in incoming)
        if is_writing or now < self._lingers_until_s:
            return self._config.poll_s
        if is_granted:
            return self._config.idle_poll_s
        return self._config.tick_s if incoming or self._sender.has_sends else None
