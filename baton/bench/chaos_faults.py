"""What goes wrong, when, and to whom: drawn from a seed before it begins. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from engine.errors import InvalidConfig


class Kind(Enum):
    KILL = "kill"  # SIGKILL; a new process on the same address as soon as it can be
    STOP = "stop"  # SIGSTOP, and SIGCONT after a while
    FREEZE = "freeze"  # the same for longer than anybody waits for an answer to a ping
    SLOW = "slow"  # stopped for a moment, again and again
    CUT = "cut"  # a prefill node's links to decode nodes break off, and no new one is made
    HUSH = "hush"  # they stay, and nothing comes through
    CROWD = "crowd"  # more clients than the caches have room for
    DROP = "drop"  # half of what a node says on its links, and of the notices it gets, is lost
    LATE = "late"  # all of it comes late
    DOUBLE = "double"  # all of it comes twice
    SWAP = "swap"  # half of it comes after what was said later
    CORRUPT = "corrupt"  # a prefill node's writes carry other bytes than they should
    JUMP = "jump"  # the wall clock of a process goes forward or back, and back again
    HOSTILE = "hostile"  # a client sends the worst that the limits allow


class Phase(Enum):
    """What the newest request has reached when a fault strikes."""

    ASKED = "asked"  # sent; no token has come
    FIRST_TOKEN = "first token"
    DECODING = "decoding"


class Role(Enum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


ROLES_HIT_BY = {
    Kind.KILL: (Role.ROUTER, Role.PREFILL, Role.DECODE),
    Kind.STOP: (Role.ROUTER, Role.PREFILL, Role.DECODE),
    Kind.FREEZE: (Role.DECODE,),
    Kind.SLOW: (Role.ROUTER, Role.PREFILL, Role.DECODE),
    Kind.CUT: (Role.PREFILL,),
    Kind.HUSH: (Role.PREFILL,),
    Kind.CROWD: (Role.ROUTER,),
    Kind.DROP: (Role.PREFILL, Role.DECODE),
    Kind.LATE: (Role.PREFILL, Role.DECODE),
    Kind.DOUBLE: (Role.PREFILL, Role.DECODE),
    Kind.SWAP: (Role.PREFILL, Role.DECODE),
    Kind.CORRUPT: (Role.PREFILL,),
    Kind.JUMP: (Role.ROUTER, Role.PREFILL, Role.DECODE),
    Kind.HOSTILE: (Role.ROUTER,),
}
# What a wire does that is unruly.
OF_WIRES = frozenset({Kind.DROP, Kind.LATE, Kind.DOUBLE, Kind.SWAP, Kind.CORRUPT})
OF_CLIENTS = frozenset({Kind.CROWD, Kind.HOSTILE})
SHORTEST_S, LONGEST_S = 0.3, 6.0


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    at_s: float  # since the beginning; it strikes when a request is in its phase after that
    kind: Kind
    role: Role
    place: int  # which one of its role
    phase: Phase
    lasts_s: float  # of what does not last by itself

    def __str__(self) -> str:
        who = f"{self.role.value}-{self.place}" if self.role is not Role.ROUTER else "router"
        return self.kind.value if self.kind in OF_CLIENTS else f"{self.kind.value} {who}"


@dataclass(frozen=True, slots=True)
class Script:
    seed: int = 0
    duration_s: float = 60.0
    every_s: float = 5.0  # on average
    kinds: tuple[Kind, ...] = tuple(Kind)
    roles: tuple[Role, ...] = tuple(Role)

    def __post_init__(self) -> None:
        for name in ("duration_s", "every_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it must be above 0")
        if not any(self.choices):
            raise InvalidConfig("no fault of these kinds can strike these roles")

    @property
    def choices(self) -> Sequence[tuple[Kind, Role]]:
        return [(kind, role) for kind in self.kinds for role in self._roles_of(kind)]

    def _roles_of(self, kind: Kind) -> Sequence[Role]:
        return [role for role in ROLES_HIT_BY[kind] if role in self.roles]


def faults(script: Script, num_by_role: Mapping[Role, int]) -> list[Fault]:
    """Same script, same faults: each kind at each role in turn, in an order that is drawn."""
    draw = random.Random(script.seed)
    drawn: list[Fault] = []
    bag: list[tuple[Kind, Role]] = []
    at_s = 0.0
    while (at_s := at_s + draw.uniform(0.5, 1.5) * script.every_s) < script.duration_s:
        if not bag:
            bag = draw.sample(script.choices, k=len(script.choices))
        kind, role = bag.pop()
        place = draw.randrange(num_by_role.get(role, 1))
        phase = draw.choice(tuple(Phase))
        # As many short ones as long ones, on the scale of how long peers wait for each other.
        lasts_s = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** draw.random()
        drawn.append(Fault(len(drawn), at_s, kind, role, place, phase, lasts_s))
    return drawn
