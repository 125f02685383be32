"""Checks of structured outputs on threads: bounded, without blocking the event loop."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.engine.structured_output.llguidance_backend import Checked
from baton.router.input_processing.form_checks import FormChecks
from baton.router.input_processing.input_processor import InputProcessor
from baton.router.request_scope import RequestContext
from baton.router.values import GenerateCall, TokenPrompt
from baton.rpc.errors import QueueFull
from tests.support.grammars import BAD, GOOD, PATIENCE_S, SLOW, HeldLibrary
from tests.support.node_calls import a_table
from tests.support.profiles import profiles_of


def compiler_of(library: HeldLibrary) -> GrammarCompiler[Checked]:
    return cast("GrammarCompiler[Checked]", GrammarCompiler(library.compile))


def test_requests_without_a_constraint_are_not_checked() -> None:
    library = HeldLibrary()
    with compiler_of(library) as compiler:
        checks = FormChecks(compiler)
        table = a_table()
        inputs = InputProcessor(table, profiles_of(table), checks)
        for form in (None, GOOD):
            call = GenerateCall("a", TokenPrompt((1,)), SamplingParams(structured_outputs=form))
            asyncio.run(inputs.process(call, RequestContext(0.0)))

    assert library.compiled == [GOOD]


def test_a_slow_check_blocks_neither_the_event_loop_nor_other_checks() -> None:
    library = HeldLibrary()

    async def look(checks: FormChecks) -> None:
        slow = asyncio.ensure_future(checks.check(SLOW))
        await asyncio.to_thread(library.has_begun.wait, PATIENCE_S)
        await checks.check(GOOD)
        assert not slow.done()
        library.may_end.set()
        await slow

    with compiler_of(library) as compiler:
        asyncio.run(look(FormChecks(compiler)))

    assert library.compiled == [GOOD, SLOW]


def test_a_form_whose_request_was_cancelled_is_not_compiled() -> None:
    library = HeldLibrary()

    async def look(checks: FormChecks) -> None:
        slow = asyncio.ensure_future(checks.check(SLOW))
        await asyncio.to_thread(library.has_begun.wait, PATIENCE_S)
        cancelled = asyncio.ensure_future(checks.check(GOOD))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        library.may_end.set()
        await slow
        await checks.check(StructuredOutputs(regex="later"))

    compiler = cast("GrammarCompiler[Checked]", GrammarCompiler(library.compile, num_threads=1))
    with compiler:
        asyncio.run(look(FormChecks(compiler)))

    assert GOOD not in library.compiled


def test_an_invalid_constraint_is_refused_with_the_reason() -> None:
    with compiler_of(HeldLibrary()) as compiler, pytest.raises(InvalidRequest, match="it is bad"):
        asyncio.run(FormChecks(compiler).check(BAD))


def test_a_valid_constraint_is_compiled_once() -> None:
    library = HeldLibrary()

    async def look(checks: FormChecks) -> None:
        for _ in range(3):
            await checks.check(GOOD)

    with compiler_of(library) as compiler:
        asyncio.run(look(FormChecks(compiler)))

    assert library.compiled == [GOOD]


def test_a_check_beyond_the_queue_limit_is_refused() -> None:
    library = HeldLibrary()
    forms = [StructuredOutputs(regex=str(number)) for number in range(2)]

    async def look(checks: FormChecks) -> None:
        waiting = [asyncio.ensure_future(checks.check(form)) for form in (SLOW, SLOW)]
        await asyncio.to_thread(library.has_begun.wait, PATIENCE_S)
        with pytest.raises(QueueFull, match="2 requests"):
            await checks.check(forms[0])
        waiting.pop().cancel()
        await asyncio.sleep(0)
        await checks.check(forms[1])
        library.may_end.set()
        await asyncio.gather(*waiting)

    with compiler_of(library) as compiler:
        asyncio.run(look(FormChecks(compiler, max_waiting=2)))


def test_a_client_leaves_room_for_others() -> None:
    library = HeldLibrary()
    forms = [StructuredOutputs(regex=str(number)) for number in range(3)]

    async def look(checks: FormChecks) -> None:
        waiting = [asyncio.ensure_future(checks.check(SLOW, "a")) for _ in range(2)]
        await asyncio.to_thread(library.has_begun.wait, PATIENCE_S)
        with pytest.raises(QueueFull, match="2 requests of this token"):
            await checks.check(forms[0], "a")
        await checks.check(forms[1], "b")
        library.may_end.set()
        await asyncio.gather(*waiting)
        await checks.check(forms[2], "a")

    with compiler_of(library) as compiler:
        asyncio.run(look(FormChecks(compiler, max_waiting=8)))


def test_a_small_constraint_is_accepted_while_large_ones_fill_the_queue() -> None:
    library = HeldLibrary()
    large = StructuredOutputs(regex="large one")

    async def look(checks: FormChecks) -> None:
        waiting = asyncio.ensure_future(checks.check(SLOW))
        await asyncio.to_thread(library.has_begun.wait, PATIENCE_S)
        with pytest.raises(QueueFull):
            await checks.check(large)
        await checks.check(GOOD)
        library.may_end.set()
        await waiting
        await checks.check(large)

    with compiler_of(library) as compiler:
        asyncio.run(look(FormChecks(compiler, max_waiting_characters=10)))


def test_a_grammar_compiled_after_the_event_loop_closed_raises_in_no_thread() -> None:
    library = HeldLibrary()

    async def leave(checks: FormChecks) -> None:
        left = asyncio.ensure_future(checks.check(SLOW))
        await asyncio.to_thread(library.has_begun.wait, PATIENCE_S)
        left.cancel()

    with compiler_of(library) as compiler:
        asyncio.run(leave(FormChecks(compiler)))
        library.may_end.set()
        asyncio.run(FormChecks(compiler).check(GOOD))

    assert set(library.compiled) == {SLOW, GOOD}
