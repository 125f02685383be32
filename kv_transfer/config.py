"""Time and size limits of a hand-off, for both sides. Times are seconds of a monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.core.options import KV_CACHE, Option, check_options


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """Limits on D."""

    # Time P can post writes without a Renew; renewed at a third of it.
    lease_s: Annotated[
        float,
        Option(
            "Seconds that a prefill node may write KV without a message from the decode node.",
            KV_CACHE,
            name="kv_lease_s",
            above=0,
            is_setting=True,
        ),
    ] = 5.0
    silence_s: Annotated[  # with receives outstanding
        float,
        Option(
            "Seconds without an answer after which a peer is given up. Nodes in a long forward "
            "pass keep sending heartbeats, up to stuck-after-s.",
            KV_CACHE,
            name="kv_silence_s",
            above=0,
            is_setting=True,
        ),
    ] = 10.0
    # If a revoke or a Hello is not answered for so long, the pair is cut although P is alive. Must
    # exceed the duration of a layer, during which P's engine thread cannot reply.
    fence_age_s: float = 60.0
    give_up_s: float = 300.0  # backstop: a receive fails after this, even if P is alive
    max_staging_wait_s: float = 30.0  # for room in the staging area; P holds a result for longer
    # Interval of renewals, short enough that one lost or late message does no harm.
    renew_every_s: float = field(init=False)

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "renew_every_s", min(self.lease_s, self.silence_s) / 3)


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """Limits on P."""

    hold_s: float = 60.0  # time a computed result is held for D's grant
    write_timeout_s: float = 60.0  # a write that takes longer breaks the pair
    max_in_flight_bytes: int = 64 << 20  # per peer; bounds what lands after a lease has ended
    max_write_bytes: int = 32 << 20  # per post, so that two are in flight
    num_remembered: int = 10_000  # ended hand-offs; a late grant of one is answered with Failed


@dataclass(frozen=True, slots=True)
class KvWorkerConfig:
    """Limits of the KV worker as a whole."""

    verify: Annotated[  # compare digests of sent and landed blocks; GPUs need `hash_blocks`
        bool,
        Option(
            "Verify transferred KV by digest. GPUs without --kernels triton copy it to the host "
            "for that.",
            KV_CACHE,
            name="kv_verify",
            is_setting=True,
        ),
    ] = True
    receiver: ReceiverConfig = field(default_factory=ReceiverConfig)
    sender: SenderConfig = field(default_factory=SenderConfig)
    poll_s: float = 0.001  # polling interval while bytes are in flight
    burst_poll_s: float = 0.00002  # in the first `burst_s` of a transfer; most writes end in it
    burst_s: float = 0.02
    idle_poll_s: float = 0.01  # while a grant is out and no bytes are known to be in flight
    linger_s: float = 0.1  # P keeps polling for so long to flush its last notification
    tick_s: float = 0.02  # interval of deadline checks
    busy_s: float = 60.0  # keep-alives stop when the engine thread is inactive for longer
    redial_s: float = 1.0  # interval of redialling cut peers, to end their fences
