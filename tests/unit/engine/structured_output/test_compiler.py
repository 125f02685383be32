"""Grammar compilation on threads: deduplication, cache, errors and shutdown."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler import LARGE_CHARACTERS, GrammarCompiler
from baton.engine.structured_output.compiler_errors import TemporaryRefusal
from tests.support.grammars import BAD, GOOD, PATIENCE_S, SLOW, AnyAnswer, HeldLibrary

Outcome = AnyAnswer | InvalidRequest
RecordedPopen = tuple[str, Outcome]


class Listener:
    def __init__(self) -> None:
        self._outcomes: queue.SimpleQueue[RecordedPopen] = queue.SimpleQueue()

    def callback(self, name: str) -> Callable[[Outcome], None]:
        return lambda outcome: self._outcomes.put((name, outcome))

    def next(self) -> RecordedPopen:
        return self._outcomes.get(timeout=PATIENCE_S)

    @property
    def has_received_nothing(self) -> bool:
        return self._outcomes.empty()


def test_a_slow_grammar_does_not_delay_others() -> None:
    library, listener = HeldLibrary(), Listener()
    with GrammarCompiler(library.compile) as compiler:
        compiler.start(SLOW, listener.callback("slow"))
        library.has_begun.wait(PATIENCE_S)
        compiler.start(GOOD, listener.callback("good"))

        first, _ = listener.next()
        library.may_end.set()
        second, _ = listener.next()

    assert (first, second) == ("good", "slow")


def test_requests_for_the_same_grammar_share_one_compilation() -> None:
    library, listener = HeldLibrary(), Listener()
    with GrammarCompiler(library.compile) as compiler:
        compiler.start(SLOW, listener.callback("a"))
        library.has_begun.wait(PATIENCE_S)
        compiler.start(SLOW, listener.callback("b"))
        library.may_end.set()
        reported = dict([listener.next(), listener.next()])
        compiler.start(SLOW, listener.callback("c"))
        name, later = listener.next()

    assert library.compiled == [SLOW]
    assert name == "c"
    assert reported["a"] is reported["b"] is later


def test_a_cancelled_grammar_is_compiled_only_if_another_request_waits_for_it() -> None:
    library, listener = HeldLibrary(), Listener()
    shared = StructuredOutputs(regex="shared")
    first, second, third = (listener.callback(name) for name in ("first", "second", "third"))
    with GrammarCompiler(library.compile, num_threads=1) as compiler:
        compiler.start(SLOW, listener.callback("slow"))
        library.has_begun.wait(PATIENCE_S)
        for wanted, callback in ((GOOD, first), (shared, second), (shared, third)):
            compiler.start(wanted, callback)
        compiler.cancel(GOOD, first)
        compiler.cancel(GOOD, first)  # without effect
        compiler.cancel(shared, second)
        library.may_end.set()
        names = [listener.next()[0], listener.next()[0]]

    assert names == ["slow", "third"]
    assert library.compiled == [SLOW, shared]
    assert listener.has_received_nothing


def test_clients_take_turns() -> None:
    library, listener = HeldLibrary(), Listener()
    many = [StructuredOutputs(regex=f"many {number}") for number in range(5)]
    with GrammarCompiler(library.compile, num_threads=1) as compiler:
        compiler.start(SLOW, listener.callback("slow"), "a")
        library.has_begun.wait(PATIENCE_S)
        for wanted in many:
            compiler.start(wanted, listener.callback("many"), "a")
        compiler.start(GOOD, listener.callback("good"), "b")
        compiler.start(many[-1], listener.callback("shared"), "c")  # not behind those of "a"
        library.may_end.set()
        names = [listener.next()[0] for _ in range(8)]

    assert library.compiled == [SLOW, many[0], GOOD, many[4], *many[1:4]]
    assert names == ["slow", "many", "good", "many", "shared", "many", "many", "many"]


def test_a_grammar_that_is_being_compiled_is_not_compiled_again() -> None:
    library, listener = HeldLibrary(), Listener()
    with GrammarCompiler(library.compile) as compiler:
        first = listener.callback("first")
        compiler.start(SLOW, first, "a")
        library.has_begun.wait(PATIENCE_S)
        compiler.cancel(SLOW, first)
        compiler.start(SLOW, listener.callback("second"), "b")
        compiler.start(GOOD, listener.callback("good"), "b")  # behind it, on the other thread
        name, _ = listener.next()
        library.may_end.set()
        later, _ = listener.next()

    assert (name, later) == ("good", "second")
    assert library.compiled == [GOOD, SLOW]


def test_a_refused_grammar_is_not_compiled_again() -> None:
    library, listener = HeldLibrary(), Listener()
    outcomes = []
    with GrammarCompiler(library.compile, num_threads=1, max_cached_grammars=1) as compiler:
        for wanted in (GOOD, BAD, BAD, GOOD):
            compiler.start(wanted, listener.callback("it"))
            outcomes.append(listener.next()[1])

    assert library.compiled == [GOOD, BAD]
    first, second = outcomes[1:3]
    assert isinstance(first, InvalidRequest)
    assert isinstance(second, InvalidRequest)
    assert (str(second), second.field) == (str(first), first.field) == ("it is bad", "regex")
    assert second.__traceback__ is None


def test_cached_refusals_are_bounded() -> None:
    library, listener = HeldLibrary(), Listener()
    other = StructuredOutputs(regex="bad, too")
    library.bad = frozenset({BAD, other})
    with GrammarCompiler(library.compile, num_threads=1, max_cached_refusals=1) as compiler:
        for wanted in (BAD, other, other, BAD):
            compiler.start(wanted, listener.callback("it"))
            listener.next()

    assert library.compiled == [BAD, other, BAD]


def test_a_temporary_refusal_is_not_cached() -> None:
    library, listener = HeldLibrary(), Listener()
    library.refusal = TemporaryRefusal
    with GrammarCompiler(library.compile) as compiler:
        for _ in range(2):
            compiler.start(BAD, listener.callback("bad"))
            _, outcome = listener.next()
            assert isinstance(outcome, InvalidRequest)

    assert library.compiled == [BAD, BAD]


def test_a_library_exception_becomes_a_refusal_and_ends_no_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(BaseException):
        """Error that a library in another language may raise."""

    class BrokenLibrary(HeldLibrary):
        def compile(self, wanted: StructuredOutputs) -> AnyAnswer:
            if wanted == BAD:
                raise Broken
            return super().compile(wanted)

    listener = Listener()
    with GrammarCompiler(BrokenLibrary().compile, num_threads=1) as compiler:
        compiler.start(BAD, listener.callback("bad"))
        _, refusal = listener.next()
        compiler.start(GOOD, listener.callback("good"))
        _, grammar = listener.next()

    assert isinstance(refusal, InvalidRequest)
    assert isinstance(grammar, AnyAnswer)
    assert "unexpected exception" in caplog.text


def test_the_grammar_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    library, listener = HeldLibrary(), Listener()
    one, two, three = (StructuredOutputs(regex=text) for text in ("1", "2", "3"))
    with GrammarCompiler(library.compile, num_threads=1, max_cached_grammars=2) as compiler:
        for wanted in (one, two, one, three, one, two):
            compiler.start(wanted, listener.callback("it"))
            listener.next()

    assert library.compiled == [one, two, three, two]


def test_large_grammars_do_not_delay_small_ones() -> None:
    library, listener = HeldLibrary(), Listener()
    large = [StructuredOutputs(json=f'"{number}{" " * LARGE_CHARACTERS}"') for number in range(4)]
    library.slow = frozenset(large)
    with GrammarCompiler(library.compile) as compiler:
        for wanted in large:
            compiler.start(wanted, listener.callback("large"))
        library.has_begun.wait(PATIENCE_S)
        compiler.start(GOOD, listener.callback("good"))

        first, _ = listener.next()
        library.may_end.set()
        others = [listener.next()[0] for _ in large]

    assert (first, others) == ("good", ["large"] * 4)


def test_large_grammars_reduce_the_number_of_cached_ones() -> None:
    library, listener = HeldLibrary(), Listener()
    forms = [StructuredOutputs(regex=text) for text in ("one", "two", "three", "more than all")]
    with GrammarCompiler(library.compile, num_threads=1, max_cached_characters=8) as compiler:
        for wanted in (*forms, forms[-1], forms[2]):
            compiler.start(wanted, listener.callback("it"))
            listener.next()

    assert library.compiled == [*forms, forms[-1], forms[2]]


def test_closing_the_compiler_leaves_no_thread() -> None:
    library, listener = HeldLibrary(), Listener()
    before = set(threading.enumerate())
    with GrammarCompiler(library.compile) as compiler:
        compiler.start(SLOW, listener.callback("slow"))
        library.has_begun.wait(PATIENCE_S)
        started = set(threading.enumerate()) - before
        assert any(thread.name.startswith("grammars") for thread in started)
        library.may_end.set()

    assert not any(thread.is_alive() for thread in started)
