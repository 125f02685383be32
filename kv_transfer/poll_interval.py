"""Polling interval of the KV worker. Pure: the time is an argument."""

from __future__ import annotations

from kv_transfer.config import KvWorkerConfig
from kv_transfer.protocol.incoming import IncomingState
from kv_transfer.protocol.receiver import Receiver
from kv_transfer.protocol.sender import Sender


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
        delays = [self._poll_interval_s(now)]
        ticks = [self._receiver.next_tick_s(), self._sender.next_tick_s()]
        delays += [max(tick - now, self._config.tick_s) for tick in ticks if tick is not None]
        return min((delay for delay in delays if delay is not None), default=None)

    def _poll_interval_s(self, now: float) -> float | None:
        is_writing = any(incoming.is_writing for incoming in self._receiver.incoming())
        states = {incoming.state for incoming in self._receiver.incoming()}
        is_awaiting = bool(states - {IncomingState.WAITING})
        if now < self._bursts_until_s and (is_awaiting or self._sender.has_flights):
            return self._config.burst_poll_s
        if is_writing or self._sender.has_flights or now < self._lingers_until_s:
            return self._config.poll_s
        return self._config.idle_poll_s if is_awaiting else None
