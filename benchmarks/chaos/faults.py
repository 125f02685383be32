"""Fault script: kind, time and victim of each fault, drawn from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.core.errors import InvalidConfig


class FaultKind(Enum):
    KILL = "kill"  # SIGKILL, then restart on the same address
    STOP = "stop"  # SIGSTOP, then SIGCONT after a while
    FREEZE = "freeze"  # the same, longer than all keepalive timeouts
    SLOW = "slow"  # stopped for a moment repeatedly
    PAUSE = "pause"  # the scheduler of a node is paused by an operator, and resumed
    CUT = "cut"  # KV links of a prefill node are aborted, and new ones are refused
    STALL = "stall"  # KV links stay open but transfer nothing
    OVERLOAD = "overload"  # more clients than the KV caches can hold
    DROP = "drop"  # half of a node's link messages and notifications are lost
    LATE = "late"  # all of them are delayed
    DOUBLE = "double"  # all of them arrive twice
    SWAP = "swap"  # half of them are reordered
    CORRUPT = "corrupt"  # writes of a node carry wrong bytes
    JUMP = "jump"  # the wall clock of a process is wrong for a while
    HOSTILE = "hostile"  # a client sends the most expensive requests the limits allow
    SPOIL = "spoil"  # bytes of half of the blocks in files and objects change
    TRUNCATE = "truncate"  # half of them lose their end
    EMPTY = "empty"  # all of them are deleted
    BLOCK = "block"  # a file is in the place of the tiers' folder, so that all access fails
    DOWN = "down"  # the object store breaks off all requests
    SILENT = "silent"  # it answers none
    RESET = "reset"  # the prefix cache or a tier is reset on all nodes
    LOADS = "loads"  # second turns, whose KV must be loaded from the tiers
    TENANTS = "tenants"  # a tenant stores much more than its quota, next to second turns of others
    SLOW_DISK = "slow-disk"  # host memory fills with blocks that a slow disk lacks
    KILL_RANK = "kill-rank"  # SIGKILL of a further rank of a node, which ends and is restarted
    STOP_RANK = "stop-rank"  # SIGSTOP, then SIGCONT after a while
    HANG_RANK = "hang-rank"  # SIGSTOP, until the node ends because of it
    LEND = "lend"  # a node offers the other kind of leg for a while
    ADAPTERS = "adapters"  # an adapter is loaded, replaced and unloaded while requests use it


class Phase(Enum):
    """Progress of the newest request when a fault strikes."""

    SENT = "sent"  # no token received
    FIRST_TOKEN = "first token"
    DECODING = "decoding"


class TargetRole(Enum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    EMBED = "embed"  # nodes of the further model
    ENCODE = "encode"  # nodes that encode pictures
    VLLM = "vllm"  # vLLM servers, which no fault kills


NODES_AND_ROUTER = (
    TargetRole.ROUTER, TargetRole.PREFILL, TargetRole.DECODE, TargetRole.EMBED, TargetRole.ENCODE,
)  # fmt: skip
NODES_WITH_KV = (TargetRole.PREFILL, TargetRole.DECODE, TargetRole.ENCODE)


ROLES_BY_FAULT_KIND = {
    FaultKind.KILL: NODES_AND_ROUTER,
    FaultKind.STOP: tuple(TargetRole),
    FaultKind.FREEZE: (TargetRole.DECODE, TargetRole.VLLM),
    FaultKind.SLOW: tuple(TargetRole),
    FaultKind.PAUSE: (*NODES_WITH_KV, TargetRole.EMBED),
    FaultKind.CUT: (TargetRole.PREFILL,),
    FaultKind.STALL: (TargetRole.PREFILL,),
    FaultKind.OVERLOAD: (TargetRole.ROUTER,),
    FaultKind.DROP: NODES_WITH_KV,
    FaultKind.LATE: NODES_WITH_KV,
    FaultKind.DOUBLE: NODES_WITH_KV,
    FaultKind.SWAP: NODES_WITH_KV,
    FaultKind.CORRUPT: (TargetRole.PREFILL, TargetRole.ENCODE),
    FaultKind.JUMP: NODES_AND_ROUTER,
    FaultKind.HOSTILE: (TargetRole.ROUTER,),
    FaultKind.SPOIL: (TargetRole.ROUTER,),
    FaultKind.TRUNCATE: (TargetRole.ROUTER,),
    FaultKind.EMPTY: (TargetRole.ROUTER,),
    FaultKind.BLOCK: (TargetRole.ROUTER,),
    FaultKind.DOWN: (TargetRole.ROUTER,),
    FaultKind.SILENT: (TargetRole.ROUTER,),
    FaultKind.RESET: (TargetRole.ROUTER,),
    FaultKind.LOADS: (TargetRole.ROUTER,),
    FaultKind.TENANTS: (TargetRole.ROUTER,),
    FaultKind.SLOW_DISK: (TargetRole.ROUTER,),
    FaultKind.KILL_RANK: (TargetRole.PREFILL, TargetRole.DECODE),
    FaultKind.STOP_RANK: (TargetRole.PREFILL, TargetRole.DECODE),
    FaultKind.HANG_RANK: (TargetRole.PREFILL, TargetRole.DECODE),
    FaultKind.LEND: (TargetRole.PREFILL, TargetRole.DECODE),
    FaultKind.ADAPTERS: (TargetRole.ROUTER,),
}
# Faults of the KV transfer.
TRANSFER_FAULTS = frozenset(
    {FaultKind.DROP, FaultKind.LATE, FaultKind.DOUBLE, FaultKind.SWAP, FaultKind.CORRUPT}
)
# Faults of further ranks of a node.
RANK_FAULTS = frozenset({FaultKind.KILL_RANK, FaultKind.STOP_RANK, FaultKind.HANG_RANK})
# Faults of what nodes store outside their memory.
STORAGE_FAULTS = frozenset({
    FaultKind.SPOIL, FaultKind.TRUNCATE, FaultKind.EMPTY,
    FaultKind.BLOCK, FaultKind.DOWN, FaultKind.SILENT,
})  # fmt: skip
# Second turns, whose loads are counted: no other fault begins meanwhile.
PROBES = frozenset({FaultKind.LOADS, FaultKind.TENANTS})
# Heavy use of tiers. Other requests must not notice it.
TIER_LOAD = PROBES | {FaultKind.SLOW_DISK}
TIER_FAULTS = STORAGE_FAULTS | {FaultKind.RESET} | TIER_LOAD
# Faults that need no healthy process.
FAULTS_WITHOUT_VICTIM = TIER_FAULTS | {FaultKind.ADAPTERS}
# Faults that strike no process.
SHARED_FAULTS = frozenset({FaultKind.OVERLOAD, FaultKind.HOSTILE}) | FAULTS_WITHOUT_VICTIM
MIN_DURATION_S, MAX_DURATION_S = 0.3, 6.0


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    at_s: float  # earliest time since the start; strikes when a request reaches `phase`
    kind: FaultKind
    role: TargetRole
    place: int  # index within the role
    phase: Phase
    lasts_s: float  # duration, for kinds that need one

    def __str__(self) -> str:
        who = f"{self.role.value}-{self.place}" if self.role is not TargetRole.ROUTER else "router"
        return self.kind.value if self.kind in SHARED_FAULTS else f"{self.kind.value} {who}"


@dataclass(slots=True)
class InjectedFault:
    """A fault with its victim and times."""

    fault: Fault
    victim: str
    at_s: float
    listening_s: float = 0.0  # start of listening of the process that replaces a killed one
    recovered_s: float = 0.0
    attack: str = ""  # attack of the hostile client, or a heavy use of tiers
    outcomes: Mapping[str, int] | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)  # that it struck: counts


@dataclass(frozen=True, slots=True)
class Script:
    seed: int = 0
    duration_s: float = 60.0
    every_s: float = 5.0
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    roles: tuple[TargetRole, ...] = tuple(TargetRole)

    def __post_init__(self) -> None:
        for name in ("duration_s", "every_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it must be above 0")
        if not any(self.choices):
            raise InvalidConfig("none of these fault kinds applies to these roles")

    @property
    def choices(self) -> Sequence[tuple[FaultKind, TargetRole]]:
        return [(kind, role) for kind in self.kinds for role in self._roles_of(kind)]

    def _roles_of(self, kind: FaultKind) -> Sequence[TargetRole]:
        return [role for role in ROLES_BY_FAULT_KIND[kind] if role in self.roles]


def faults(script: Script, num_by_role: Mapping[TargetRole, int]) -> list[Fault]:
    """Return the faults of a script, deterministically: each kind and role in random order."""
    draw = random.Random(script.seed)
    drawn: list[Fault] = []
    choices = [one for one in script.choices if num_by_role.get(one[1], 1)]
    if not choices:
        raise InvalidConfig("no process of this run has any of these faults")
    bag: list[tuple[FaultKind, TargetRole]] = []
    at_s = 0.0
    while (at_s := at_s + draw.uniform(0.5, 1.5) * script.every_s) < script.duration_s:
        if not bag:
            bag = draw.sample(choices, k=len(choices))
        kind, role = bag.pop()
        place = draw.randrange(num_by_role.get(role, 1))
        phase = draw.choice(tuple(Phase))
        # Log-uniform over the range of the peers' timeouts.
        lasts_s = MIN_DURATION_S * (MAX_DURATION_S / MIN_DURATION_S) ** draw.random()
        drawn.append(Fault(len(drawn), at_s, kind, role, place, phase, lasts_s))
    return drawn
