"""Quarantine: identifies the request that crashes engines (the poison). Pure.

When an engine ends, every request on it becomes a suspect. Each suspect is tested: its next attempt
is the only one on its node that is not yet proven by a few generated tokens. If that engine ends
too, the suspect is the poison and fails; the other requests there are bystanders and continue on
other nodes. So a poison ends two engines, whatever progress its attempts make. It can end a third
only after passing its test, which takes more tokens each time.

A node that vanishes may just have been killed, which must not put all its requests to the test.
There, a request becomes a suspect only if two nodes in a row vanished before it was proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from router.policy import Route
from serving.errors import FailureKind

PROVEN_TOKENS = 4
TEST_FACTOR, MAX_TEST_TOKENS = 4, 64  # each further test takes TEST_FACTOR times as many tokens
MAX_VANISHED = 2
MAX_FAILED_PASSES = 2
MAX_ENGINES = 6  # that ended with one request, tested or not


class Verdict(Enum):
    ORDINARY = "ordinary"  # a failure without suspicion
    BYSTANDER = "bystander"  # another request ended the engine
    SUSPECT = "suspect"  # it may have ended the engine, and is tested
    POISON = "poison"


@dataclass(slots=True, eq=False)
class Kin:
    """State shared by the answers to one prompt: if one is the poison, all are."""

    is_suspect: bool = False
    is_poisoned: bool = False
    boardings: set[Boarding] = field(default_factory=set)  # current attempts


class Suspicion:
    """Suspicion against one request, kept across its attempts."""

    def __init__(self, kin: Kin | None = None) -> None:
        self.kin = kin or Kin()
        self.is_suspect = False  # its current or next attempt is a test
        self.num_tests = 0
        self.num_engines = 0  # that reported their own failure
        self.num_vanished = 0  # nodes in a row, before the request was proven
        self.num_failed_passes = 0

    def suspect(self) -> Verdict:
        self.is_suspect = self.kin.is_suspect = True
        return Verdict.SUSPECT


class Boarding:
    """Presence of one attempt on its nodes, from their choice to its end."""

    def __init__(self, suspicion: Suspicion, route: Route) -> None:
        self.suspicion = suspicion
        self.addresses = set(route.addresses)  # less the nodes that are done with it
        self.is_test = suspicion.is_suspect
        self.num_tokens = 0
        self.deaths: dict[str, _Death] = {}

    @property
    def is_proven(self) -> bool:
        """True if the attempt has generated enough tokens to be thought harmless."""
        return self.num_tokens >= PROVEN_TOKENS

    @property
    def has_passed(self) -> bool:
        """True if it passed its test. It stays a suspect until another attempt joins its nodes."""
        factor = TEST_FACTOR ** max(0, self.suspicion.num_tests - 1)
        return self.num_tokens >= min(int(PROVEN_TOKENS * factor), MAX_TEST_TOKENS)

    def is_tested_at(self, address: str) -> bool:
        return self.is_test and address in self.addresses


@dataclass(frozen=True, slots=True)
class _Death:
    """End of one engine, reported separately by each request on it."""

    test: Boarding | None  # the only unproven attempt, if it was a test
    was_alone: bool


class Quarantine:
    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change  # wakes the waiting requests
        self._aboard: dict[str, set[Boarding]] = {}
        self._reserved: dict[Suspicion, frozenset[str]] = {}
        self._num_waiting = 0

    def closed_to(self, suspicion: Suspicion) -> frozenset[str]:
        """Return the addresses to which this request must not be sent now."""
        if suspicion.kin.is_suspect and not suspicion.num_tests:
            suspicion.is_suspect = True
        if suspicion.is_suspect:
            return frozenset(a for a in self._aboard if self._is_closed_to_suspects(a))
        held = (a for a in self._aboard if self._is_held_by_test(a))
        return frozenset(held).union(*self._reserved.values())

    def is_kin_tested(self, suspicion: Suspicion) -> bool:
        """True if another answer to its prompt is being tested, whose result it must await."""
        aboard = (other for boardings in self._aboard.values() for other in boardings)
        return suspicion.is_suspect and any(
            other.is_test and not other.has_passed and other.suspicion.kin is suspicion.kin
            for other in aboard
        )

    def kin_addresses(self, suspicion: Suspicion) -> frozenset[str]:
        """Return the addresses of the nodes that run other answers to the same prompt."""
        others = (other for other in suspicion.kin.boardings if other.suspicion is not suspicion)
        return frozenset(address for other in others for address in other.addresses)

    @contextmanager
    def waiting(self, suspicion: Suspicion, route: Route) -> Iterator[None]:
        """Mark a request as waiting for these nodes. A suspect reserves them for its test."""
        self._num_waiting += 1
        if suspicion.is_suspect:
            self._reserved[suspicion] = frozenset(route.addresses)
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._reserved.pop(suspicion, None) is not None:
                self._notify()

    def board(self, suspicion: Suspicion, route: Route) -> Boarding:
        """Begin an attempt. Tests on its nodes, which have been passed, end."""
        for address in route.addresses:
            for other in self._aboard.get(address, ()):
                if other.is_tested_at(address):
                    other.is_test = other.suspicion.is_suspect = False
        suspicion.num_tests += suspicion.is_suspect
        boarding = Boarding(suspicion, route)
        suspicion.kin.boardings.add(boarding)
        for address in route.addresses:
            self._aboard.setdefault(address, set()).add(boarding)
        return boarding

    def gave(self, boarding: Boarding, num_tokens: int) -> None:
        """Add tokens that the attempt has generated."""
        before = boarding.is_proven, boarding.has_passed
        boarding.num_tokens += num_tokens
        if before != (boarding.is_proven, boarding.has_passed):
            self._notify()

    def leave(self, boarding: Boarding, address: str) -> None:
        """Take the attempt off a node that is done with it."""
        if address not in boarding.addresses:
            return
        boarding.addresses.discard(address)
        aboard = self._aboard[address]
        aboard.discard(boarding)
        if not aboard:
            del self._aboard[address]
        self._notify()

    def close(self, boarding: Boarding) -> None:
        """End the attempt."""
        boarding.suspicion.kin.boardings.discard(boarding)
        for address in tuple(boarding.addresses):
            self.leave(boarding, address)

    def failed(self, boarding: Boarding, address: str, kind: FailureKind) -> Verdict:
        """Judge a request whose attempt failed on this node. Call before `close`."""
        verdict = self._verdict(boarding, address, kind)
        boarding.suspicion.kin.is_poisoned |= verdict is Verdict.POISON
        return verdict

    def _verdict(self, boarding: Boarding, address: str, kind: FailureKind) -> Verdict:
        match kind:
            case FailureKind.PASS_FAILED:
                return _failed_pass(boarding.suspicion)
            case FailureKind.ENGINE_FAILED if address in boarding.addresses:
                return _engine_failed(boarding, self._death(boarding, address))
            case FailureKind.VANISHED if address in boarding.addresses:
                return _vanished(boarding, self._death(boarding, address))
        return Verdict.ORDINARY

    def _death(self, boarding: Boarding, address: str) -> _Death:
        """Return the engine's end, as seen when the first attempt on it failed."""
        if address not in boarding.deaths:
            aboard = self._aboard[address]
            tests = [other for other in aboard if other.is_tested_at(address)]
            unproven = {other for other in aboard if not other.is_proven}
            is_clear = len(tests) == 1 and unproven <= set(tests)
            death = _Death(tests[0] if is_clear else None, len(aboard) == 1)
            for other in aboard:
                other.deaths[address] = death
        return boarding.deaths[address]

    def _is_closed_to_suspects(self, address: str) -> bool:
        is_held = self._is_held_by_test(address)
        return is_held or not all(other.is_proven for other in self._aboard[address])

    def _is_held_by_test(self, address: str) -> bool:
        aboard = self._aboard[address]
        return any(other.is_tested_at(address) and not other.has_passed for other in aboard)

    def _notify(self) -> None:
        if self._num_waiting:
            self._on_change()


def _failed_pass(suspicion: Suspicion) -> Verdict:
    """Judge a request whose pass failed alone: the node identified it and keeps running."""
    suspicion.num_failed_passes += 1
    is_last = suspicion.num_failed_passes >= MAX_FAILED_PASSES or suspicion.num_engines
    return Verdict.POISON if is_last else Verdict.SUSPECT


def _engine_failed(boarding: Boarding, death: _Death) -> Verdict:
    suspicion = boarding.suspicion
    if death.test is not None and not death.test.has_passed:
        return Verdict.POISON if death.test is boarding else Verdict.BYSTANDER
    if death.test is boarding and death.was_alone:
        return Verdict.POISON
    suspicion.num_engines += 1
    if suspicion.num_engines >= MAX_ENGINES:
        return Verdict.POISON
    return suspicion.suspect()


def _vanished(boarding: Boarding, death: _Death) -> Verdict:
    suspicion = boarding.suspicion
    if death.test is not None and not death.test.has_passed:
        return Verdict.POISON if death.test is boarding else Verdict.BYSTANDER
    if boarding.is_proven:
        suspicion.num_vanished = 0
        suspicion.is_suspect &= not boarding.has_passed
        return Verdict.ORDINARY
    suspicion.num_vanished += 1
    if suspicion.num_vanished < MAX_VANISHED:
        return Verdict.ORDINARY
    return suspicion.suspect()
