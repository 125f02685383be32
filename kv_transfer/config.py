"""The limits of a hand-off, for both sides. All times are in seconds of a monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from kv_transfer.errors import InvalidKvSetting


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """D's side."""

    lease_s: float = 5.0  # how long P may post without hearing of D; renewed at a third of it
    silence_s: float = 10.0  # a peer that says nothing for so long while asked is given up
    # A revoke or a Hello unanswered for so long costs the pair its channel though P lives: longer
    # than a layer takes, in which its engine's thread can answer nothing.
    fence_age_s: float = 60.0
    give_up_s: float = 300.0  # backstop: no receive waits longer, however alive P is

    def __post_init__(self) -> None:
        _check_positive(self)

    @property
    def renew_every_s(self) -> float:
        """Often enough that one letter may be lost, or late."""
        return min(self.lease_s, self.silence_s) / 3


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """P's side."""

    hold_s: float = 60.0  # how long a computed result waits for D's grant
    write_timeout_s: float = 60.0  # a write that D, busy or not, has not taken is given up
    max_in_flight_bytes: int = 64 << 20  # per peer; what may still land after a lease ended
    max_write_bytes: int = 32 << 20  # in one post: two are under way
    num_remembered: int = 10_000  # ended hand-offs whose late grant is refused by name

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class KvWorkerConfig:
    """Of the worker half as a whole."""

    receiver: ReceiverConfig = field(default_factory=ReceiverConfig)
    sender: SenderConfig = field(default_factory=SenderConfig)
    verify: bool = True  # digest what is sent and what has landed; CPU memory only
    poll_s: float = 0.001  # while bytes are known to move
    burst_poll_s: float = 0.00002  # as long as they have just begun to: most writes end in this
    burst_s: float = 0.02
    idle_poll_s: float = 0.01  # while a grant is out and nothing is known to move
    linger_s: float = 0.1  # P polls on for so long, so that its last notification leaves
    tick_s: float = 0.02  # how often deadlines are looked at
    busy_s: float = 60.0  # an engine's thread away for longer is no longer spoken for
    redial_s: float = 1.0  # how often a lost peer is asked whether it lives, for a fence's sake

    def __post_init__(self) -> None:
        times = (
            "poll_s",
            "burst_poll_s",
            "burst_s",
            "idle_poll_s",
            "linger_s",
            "tick_s",
            "busy_s",
            "redial_s",
        )
        for name in times:
            if not getattr(self, name) > 0:
                raise InvalidKvSetting(f"{name} is {getattr(self, name)}; it must be above 0")


def _check_positive(config: ReceiverConfig | SenderConfig) -> None:
    for limit in fields(config):
        value = getattr(config, limit.name)
        if not value > 0:
            raise InvalidKvSetting(f"{limit.name} is {value}; it must be above 0")
