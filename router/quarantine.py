"""Requests that were on nodes whose engines ended, and how the one at fault is found. Pure.

When an engine ends, every request on it is a suspect. Each suspect is tested: it is tried once
more, as the only request on its node that has not proven itself by a few tokens of this try. If
that engine ends too, the suspect is the poison and fails; the others there are bystanders and go
on elsewhere. So a poison ends two engines, whatever progress its tries make. It can end a third
only if it passed its test, which takes longer each time.

A node that vanishes may just have been killed, and all that was on it must not stand in line for
that. There, a request is a suspect if two nodes in a row vanished before it proved itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from router.policy import Route
from serving.errors import FailureKind

PROVEN_TOKENS = 4
TEST_FACTOR, MAX_TEST_TOKENS = 4, 64  # each further test of a request takes so many times as long
MAX_VANISHED = 2
MAX_FAILED_PASSES = 2
MAX_ENGINES = 6  # that ended with it, on trial or not


class Verdict(Enum):
    ORDINARY = "ordinary"  # a failure like any other
    BYSTANDER = "bystander"  # another request ended the engine
    SUSPECT = "suspect"  # it may have ended the engine, and is tried once more
    POISON = "poison"


@dataclass(slots=True, eq=False)
class Kin:
    """What the answers to one prompt have in common: if one is the poison, all of them are."""

    is_suspect: bool = False
    is_poisoned: bool = False
    boardings: set[Boarding] = field(default_factory=set)  # tries under way


class Suspicion:
    """What is held against one request, over all its tries."""

    def __init__(self, kin: Kin | None = None) -> None:
        self.kin = kin or Kin()
        self.is_suspect = False  # its next try, or the one under way, is a test
        self.num_tests = 0
        self.num_engines = 0  # that reported their own failure
        self.num_vanished = 0  # in a row, before it proved itself
        self.num_failed_passes = 0

    def suspect(self) -> Verdict:
        self.is_suspect = self.kin.is_suspect = True
        return Verdict.SUSPECT


class Boarding:
    """One try, from the choice of its nodes to its end."""

    def __init__(self, suspicion: Suspicion, route: Route) -> None:
        self.suspicion = suspicion
        self.addresses = set(route.addresses)  # less those that have done their part
        self.is_test = suspicion.is_suspect
        self.num_tokens = 0
        self.deaths: dict[str, _Death] = {}

    @property
    def is_proven(self) -> bool:
        return self.num_tokens >= PROVEN_TOKENS

    @property
    def has_passed(self) -> bool:
        """Others may board its nodes. Until one does, it stays on trial."""
        factor = TEST_FACTOR ** max(0, self.suspicion.num_tests - 1)
        return self.num_tokens >= min(int(PROVEN_TOKENS * factor), MAX_TEST_TOKENS)

    def is_tested_at(self, address: str) -> bool:
        return self.is_test and address in self.addresses


@dataclass(frozen=True, slots=True)
class _Death:
    """The end of one engine, which each request on it reports by itself."""

    test: Boarding | None  # the only one without proof, if that was a suspect on trial
    was_alone: bool


class Quarantine:
    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change  # those that wait should look again
        self._aboard: dict[str, set[Boarding]] = {}
        self._reserved: dict[Suspicion, frozenset[str]] = {}
        self._num_waiting = 0

    def closed_to(self, suspicion: Suspicion) -> frozenset[str]:
        """The addresses that this request must not be sent to now."""
        if suspicion.kin.is_suspect and not suspicion.num_tests:
            suspicion.is_suspect = True
        if suspicion.is_suspect:
            return frozenset(a for a in self._aboard if self._keeps_out_suspect(a))
        held = (a for a in self._aboard if self._is_held_by_test(a))
        return frozenset(held).union(*self._reserved.values())

    def is_kin_tested(self, suspicion: Suspicion) -> bool:
        """Another answer to its prompt is on trial; this one must wait for what becomes of it."""
        aboard = (one for boardings in self._aboard.values() for one in boardings)
        return suspicion.is_suspect and any(
            one.is_test and not one.has_passed and one.suspicion.kin is suspicion.kin
            for one in aboard
        )

    def kin_addresses(self, suspicion: Suspicion) -> frozenset[str]:
        """Return the nodes on which other answers to its prompt are."""
        others = (one for one in suspicion.kin.boardings if one.suspicion is not suspicion)
        return frozenset(address for one in others for address in one.addresses)

    @contextmanager
    def waiting(self, suspicion: Suspicion, route: Route) -> Iterator[None]:
        """It waits for these nodes. Meanwhile a suspect keeps newcomers from where it is tested."""
        self._num_waiting += 1
        if suspicion.is_suspect:
            self._reserved[suspicion] = frozenset(route.addresses)
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._reserved.pop(suspicion, None) is not None:
                self._tell()

    def board(self, suspicion: Suspicion, route: Route) -> Boarding:
        """A try begins. It ends the tests on its nodes, which have been passed."""
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
        """It has so many more tokens."""
        before = boarding.is_proven, boarding.has_passed
        boarding.num_tokens += num_tokens
        if before != (boarding.is_proven, boarding.has_passed):
            self._tell()

    def leave(self, boarding: Boarding, address: str) -> None:
        """That node has done its part."""
        if address not in boarding.addresses:
            return
        boarding.addresses.discard(address)
        aboard = self._aboard[address]
        aboard.discard(boarding)
        if not aboard:
            del self._aboard[address]
        self._tell()

    def close(self, boarding: Boarding) -> None:
        """The try has ended."""
        boarding.suspicion.kin.boardings.discard(boarding)
        for address in tuple(boarding.addresses):
            self.leave(boarding, address)

    def failed(self, boarding: Boarding, address: str, kind: FailureKind) -> Verdict:
        """Judge a request whose try failed at this node. Call it before `close`."""
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
        """As it was when the first of those aboard failed."""
        if address not in boarding.deaths:
            aboard = self._aboard[address]
            tests = [one for one in aboard if one.is_tested_at(address)]
            without_proof = {one for one in aboard if not one.is_proven}
            is_clear = len(tests) == 1 and without_proof <= set(tests)
            death = _Death(tests[0] if is_clear else None, len(aboard) == 1)
            for one in aboard:
                one.deaths[address] = death
        return boarding.deaths[address]

    def _keeps_out_suspect(self, address: str) -> bool:
        is_held = self._is_held_by_test(address)
        return is_held or not all(one.is_proven for one in self._aboard[address])

    def _is_held_by_test(self, address: str) -> bool:
        aboard = self._aboard[address]
        return any(one.is_tested_at(address) and not one.has_passed for one in aboard)

    def _tell(self) -> None:
        if self._num_waiting:
            self._on_change()


def _failed_pass(suspicion: Suspicion) -> Verdict:
    """The node has found out by itself which request it was, and lives."""
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
