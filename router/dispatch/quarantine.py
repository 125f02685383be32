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

from baton.router.routing.policy import Route
from baton.rpc.errors import FailureKind

PROVEN_TOKENS = 4
TEST_FACTOR, MAX_TEST_TOKENS = 4, 64  # each further test takes TEST_FACTOR times as many tokens
MAX_VANISHED = 2
MAX_FAILED_PASSES = 2
MAX_ENGINES = 6  # that ended with one request, tested or not


class QuarantineVerdict(Enum):
    ORDINARY = "ordinary"  # a failure without suspicion
    BYSTANDER = "bystander"  # another request ended the engine
    SUSPECT = "suspect"  # it may have ended the engine, and is tested
    POISON = "poison"


@dataclass(slots=True, eq=False)
class PromptGroup:
    """State shared by the answers to one prompt: if one is the poison, all are."""

    is_suspect: bool = False
    is_poisoned: bool = False
    attempts: set[TrackedAttempt] = field(default_factory=set)  # those that are running


class Suspicion:
    """Suspicion against one request, kept across its attempts."""

    def __init__(self, group: PromptGroup | None = None) -> None:
        self.group = group or PromptGroup()
        self.is_suspect = False  # its current or next attempt is a test
        self.num_tests = 0
        self.num_engines = 0  # that reported their own failure
        self.num_vanished = 0  # nodes in a row, before the request was proven
        self.num_failed_passes = 0

    def suspect(self) -> QuarantineVerdict:
        self.is_suspect = self.group.is_suspect = True
        return QuarantineVerdict.SUSPECT


class TrackedAttempt:
    """One attempt on its nodes, from their choice to its end."""

    def __init__(self, suspicion: Suspicion, route: Route) -> None:
        self.suspicion = suspicion
        self.addresses = set(route.addresses)  # less the nodes that are done with it
        self.num_tokens = 0
        self.engine_ends: dict[str, _EngineEnd] = {}

    @property
    def is_proven(self) -> bool:
        """True if the attempt has generated enough tokens to be thought harmless."""
        return self.num_tokens >= PROVEN_TOKENS

    @property
    def has_passed(self) -> bool:
        """True if it passed its test. It stays a suspect until another attempt joins its nodes."""
        return self.num_tokens >= self.num_test_tokens

    @property
    def num_test_tokens(self) -> int:
        factor = TEST_FACTOR ** max(0, self.suspicion.num_tests - 1)
        return min(int(PROVEN_TOKENS * factor), MAX_TEST_TOKENS)


@dataclass(frozen=True, slots=True)
class _EngineEnd:
    """End of one engine, reported separately by each request on it."""

    test: TrackedAttempt | None  # the only unproven attempt, if it was a test
    was_alone: bool


class Quarantine:
    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change  # wakes the waiting requests
        self._attempts_by_address: dict[str, set[TrackedAttempt]] = {}
        self._tests: set[TrackedAttempt] = set()  # the attempts of suspects among these
        self._reserved: dict[Suspicion, frozenset[str]] = {}
        self._num_waiting = 0

    def closed_addresses(self, suspicion: Suspicion) -> frozenset[str]:
        """Return the addresses to which this request must not be sent now."""
        if suspicion.group.is_suspect and not suspicion.num_tests:
            suspicion.is_suspect = True
        held = [test.addresses for test in self._tests if not test.has_passed]
        if suspicion.is_suspect:
            return frozenset(self._unproven_addresses()).union(*held)
        return frozenset().union(*held, *self._reserved.values())

    def is_group_tested(self, suspicion: Suspicion) -> bool:
        """True if another answer to its prompt is being tested, whose result it must await."""
        return suspicion.is_suspect and any(
            not test.has_passed and test.suspicion.group is suspicion.group for test in self._tests
        )

    def group_addresses(self, suspicion: Suspicion) -> frozenset[str]:
        """Return the addresses of the nodes that run other answers to the same prompt."""
        others = (other for other in suspicion.group.attempts if other.suspicion is not suspicion)
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

    def track(self, suspicion: Suspicion, route: Route) -> TrackedAttempt:
        """Begin an attempt, which ends the tests on its nodes: they have passed."""
        tracked = TrackedAttempt(suspicion, route)
        for other in [test for test in self._tests if test.addresses & tracked.addresses]:
            self._tests.remove(other)
            other.suspicion.is_suspect = False
        if suspicion.is_suspect:
            suspicion.num_tests += 1
            self._tests.add(tracked)
        suspicion.group.attempts.add(tracked)
        for address in tracked.addresses:
            self._attempts_by_address.setdefault(address, set()).add(tracked)
        return tracked

    def note_tokens(self, tracked: TrackedAttempt, num_tokens: int) -> None:
        before = tracked.num_tokens
        tracked.num_tokens += num_tokens
        if self._num_waiting and any(
            before < limit <= tracked.num_tokens
            for limit in (PROVEN_TOKENS, tracked.num_test_tokens)
        ):
            self._on_change()

    def release_node(self, tracked: TrackedAttempt, address: str) -> None:
        """Take the attempt off a node that is done with it."""
        if address not in tracked.addresses:
            return
        tracked.addresses.discard(address)
        attempts = self._attempts_by_address[address]
        attempts.discard(tracked)
        if not attempts:
            del self._attempts_by_address[address]
        self._notify()

    def end(self, tracked: TrackedAttempt) -> None:
        tracked.suspicion.group.attempts.discard(tracked)
        self._tests.discard(tracked)
        for address in tuple(tracked.addresses):
            self.release_node(tracked, address)

    def judge(self, tracked: TrackedAttempt, address: str, kind: FailureKind) -> QuarantineVerdict:
        """Judge a request whose attempt failed on this node. Call before `end`."""
        verdict = self._verdict(tracked, address, kind)
        tracked.suspicion.group.is_poisoned |= verdict is QuarantineVerdict.POISON
        return verdict

    def _verdict(
        self, tracked: TrackedAttempt, address: str, kind: FailureKind
    ) -> QuarantineVerdict:
        if kind is FailureKind.PASS_FAILED:
            return _failed_pass(tracked.suspicion)
        is_ordinary = kind in (FailureKind.OTHER, FailureKind.KV_LOST)
        if is_ordinary or address not in tracked.addresses:
            return QuarantineVerdict.ORDINARY
        engine_end = self._engine_end(tracked, address)
        return _judge_engine_end(tracked, engine_end, has_vanished=kind is FailureKind.VANISHED)

    def _engine_end(self, tracked: TrackedAttempt, address: str) -> _EngineEnd:
        """Return the engine's end, as seen when the first attempt on it failed."""
        if address not in tracked.engine_ends:
            attempts = self._attempts_by_address[address]
            tests = [other for other in attempts if other in self._tests]
            unproven = {other for other in attempts if not other.is_proven}
            is_clear = len(tests) == 1 and unproven <= set(tests)
            engine_end = _EngineEnd(tests[0] if is_clear else None, len(attempts) == 1)
            for other in attempts:
                other.engine_ends[address] = engine_end
        return tracked.engine_ends[address]

    def _unproven_addresses(self) -> Iterator[str]:
        for address, attempts in self._attempts_by_address.items():
            if not all(other.is_proven for other in attempts):
                yield address

    def _notify(self) -> None:
        if self._num_waiting:
            self._on_change()


def _failed_pass(suspicion: Suspicion) -> QuarantineVerdict:
    """Judge a request whose pass failed alone: the node identified it and keeps running."""
    suspicion.num_failed_passes += 1
    is_last = suspicion.num_failed_passes >= MAX_FAILED_PASSES or suspicion.num_engines
    return QuarantineVerdict.POISON if is_last else QuarantineVerdict.SUSPECT


def _judge_engine_end(
    tracked: TrackedAttempt, engine_end: _EngineEnd, *, has_vanished: bool
) -> QuarantineVerdict:
    test = engine_end.test
    if test is not None and not test.has_passed:
        return QuarantineVerdict.POISON if test is tracked else QuarantineVerdict.BYSTANDER
    if has_vanished:
        return _judge_vanished(tracked)
    suspicion = tracked.suspicion
    if test is tracked and engine_end.was_alone:
        return QuarantineVerdict.POISON
    suspicion.num_engines += 1
    if suspicion.num_engines >= MAX_ENGINES:
        return QuarantineVerdict.POISON
    return suspicion.suspect()


def _judge_vanished(tracked: TrackedAttempt) -> QuarantineVerdict:
    suspicion = tracked.suspicion
    if tracked.is_proven:
        suspicion.num_vanished = 0
        suspicion.is_suspect &= not tracked.has_passed
        return QuarantineVerdict.ORDINARY
    suspicion.num_vanished += 1
    if suspicion.num_vanished < MAX_VANISHED:
        return QuarantineVerdict.ORDINARY
    return suspicion.suspect()
