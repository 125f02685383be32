"""Tokenization of large texts on threads: bounded, without blocking the event loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest

from baton.checkpoint.tokenizer import Tokenizer
from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from baton.router.doors.grpc.translate import calls_from, check_request
from baton.router.input_processing.input_processor import InputProcessor
from baton.router.input_processing.limits import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from baton.router.input_processing.tokenization import (
    LargeTextConfig,
    LargeTexts,
    ModelText,
    TextBoundary,
)
from baton.router.request_scope import RequestContext
from baton.router.values import (
    MAX_COUNTED_CHARACTERS,
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from baton.rpc.errors import QueueFull
from baton.v1 import inference_pb2, sampling_pb2
from tests.support.node_calls import a_table
from tests.support.profiles import profiles_of

PATIENCE_S = 30.0
SMALL, LARGE = 8, 9
CONFIG = LargeTextConfig(small_size=SMALL, num_threads=2, max_waiting=3)


@dataclass
class Work:
    """Work that blocks until released, and counts its concurrent runs."""

    may_end: threading.Event = field(default_factory=threading.Event)
    began: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    num_begun: int = 0

    def __call__(self) -> str:
        self.num_begun += 1
        self.began.release()
        assert self.may_end.wait(PATIENCE_S), "the loop was held up"
        return "done"

    async def await_begun(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.began.acquire, timeout=PATIENCE_S)


def test_a_small_text_is_tokenized_on_the_event_loop() -> None:
    thread = asyncio.run(LargeTexts(CONFIG).run(SMALL, threading.get_ident))

    assert thread == threading.get_ident()


def test_the_event_loop_runs_while_a_large_text_is_tokenized() -> None:
    async def read() -> str:
        work = Work()
        reading = asyncio.ensure_future(LargeTexts(CONFIG).run(LARGE, work))
        await work.await_begun(1)
        work.may_end.set()
        return await reading

    assert asyncio.run(read()) == "done"


def test_the_thread_of_a_cancelled_request_still_counts() -> None:
    async def cancel_two_of_three() -> tuple[list[str], list[str]]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3))
        texts, work = LargeTexts(CONFIG), Work()
        left = [asyncio.ensure_future(texts.run(LARGE, work)) for _ in range(2)]
        await work.await_begun(2)
        for one in left:
            one.cancel()
        await asyncio.wait(left)
        third: list[str] = []
        reading = asyncio.ensure_future(texts.run(LARGE, lambda: third.append("read")))
        await asyncio.sleep(0)
        await asyncio.to_thread(str)  # on the only free thread, after all admitted work
        meanwhile = list(third)
        work.may_end.set()
        await reading
        return meanwhile, third

    assert asyncio.run(cancel_two_of_three()) == ([], ["read"])


def test_waiting_texts_are_limited() -> None:
    async def fill() -> list[str]:
        texts, work = LargeTexts(CONFIG), Work()
        readers = [asyncio.ensure_future(texts.run(LARGE, work)) for _ in range(2)]
        await work.await_begun(2)
        readers += [asyncio.ensure_future(texts.run(LARGE, work)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="3 large texts already wait"):
            await texts.run(LARGE, work)
        assert await texts.run(SMALL, lambda: "small") == "small"
        work.may_end.set()
        return await asyncio.gather(*readers)

    assert asyncio.run(fill()) == ["done"] * 5


def test_clients_take_turns_on_a_thread() -> None:
    async def run() -> list[str]:
        texts, work, order = LargeTexts(LargeTextConfig(SMALL, num_threads=1)), Work(), list[str]()
        first = asyncio.ensure_future(texts.run(LARGE, work, "a"))
        await work.await_begun(1)
        others = [
            asyncio.ensure_future(texts.run(LARGE, partial(order.append, name), name[0]))
            for name in ("a1", "a2", "a3", "b1", "c1")
        ]
        await asyncio.sleep(0)
        work.may_end.set()
        await asyncio.gather(first, *others)
        return order

    assert asyncio.run(run()) == ["b1", "a1", "c1", "a2", "a3"]


class CountedTurns:
    """Counts the turns of the event loop, and works in each of them."""

    def __init__(self) -> None:
        self._num_turns = 0
        self.works: Counter[int] = Counter()
        self._count()

    def note(self) -> None:
        self.works[self._num_turns] += 1

    def _count(self) -> None:
        self._num_turns += 1
        asyncio.get_running_loop().call_soon(self._count)


@pytest.mark.parametrize(("size", "most"), [(SMALL, 1), (SMALL // 2, 2), (SMALL // 8, 8)])
def test_small_texts_that_come_at_once_are_spread_over_turns_of_the_loop(
    size: int, most: int
) -> None:
    async def run() -> Counter[int]:
        texts, turns = LargeTexts(CONFIG), CountedTurns()
        await asyncio.gather(*(texts.run(size, turns.note) for _ in range(64)))
        return turns.works

    works = asyncio.run(run())
    assert works.total() == 64
    assert max(works.values()) <= 2 * most  # a turn of the test's is in two of the texts'
    assert len(works) <= 64 // most + 2


class SpelledText(TextBoundary):
    def __init__(self, turns: CountedTurns) -> None:
        super().__init__()
        self._turns = turns

    def spellings(self, word: str) -> frozenset[tuple[int, ...]]:
        self._turns.note()
        return frozenset({(1,)})


def test_bad_words_of_requests_that_come_at_once_are_spread_over_turns_of_the_loop() -> None:
    async def run() -> Counter[int]:
        table, turns = a_table(), CountedTurns()
        inputs = InputProcessor(table, profiles_of(table, SpelledText(turns)), None)
        calls = [
            GenerateCall(str(n), TokenPrompt((1,)), SamplingParams(), bad_words=(str(n) * 256,) * 8)
            for n in range(10)
        ]
        await asyncio.gather(*(inputs.process(call, RequestContext(0.0)) for call in calls))
        return turns.works

    works = asyncio.run(run())
    assert works.total() == 80
    assert max(works.values()) <= 16


def test_small_texts_of_clients_take_turns_and_cancelled_ones_take_none() -> None:
    async def run() -> list[str]:
        texts, order = LargeTexts(CONFIG), list[str]()
        tasks = {
            name: asyncio.ensure_future(texts.run(SMALL, partial(order.append, name), name[0]))
            for name in ("a1", "a2", "a3", "a4", "b1", "c1")
        }
        await asyncio.sleep(0)
        tasks["a3"].cancel()
        await asyncio.wait(tasks.values())
        return order

    assert asyncio.run(run()) == ["a1", "a2", "b1", "c1", "a4"]


def test_exceptions_of_the_work_are_raised() -> None:
    def refuse() -> None:
        raise InvalidRequest("too long")

    with pytest.raises(InvalidRequest, match="too long"):
        asyncio.run(LargeTexts(CONFIG).run(LARGE, refuse))


class Unread:
    """Tokenizer that fails the test if it is called."""

    max_token_chars = 4

    def render_chat(self, turns: list[dict[str, str]], **_: object) -> str:
        return "".join(turn["content"] for turn in turns)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("it was tokenised all the same")


def chat(text: str) -> Prompt:
    return ChatPrompt((ChatMessage("user", text),))


class EndlessTools(list[str]):
    def __iter__(self) -> Iterator[str]:
        return itertools.repeat("a tool")


def test_the_size_of_variables_is_counted_no_further_than_it_matters() -> None:
    prompt = ChatPrompt((ChatMessage("user", "a"),), variables={"tools": EndlessTools()})

    assert 2048 < prompt.num_characters < 2 * MAX_COUNTED_CHARACTERS


@pytest.mark.parametrize("prompt", [TextPrompt, chat])
def test_text_beyond_the_context_is_refused_before_tokenization(
    prompt: Callable[[str], Prompt],
) -> None:
    text = ModelText(cast("Tokenizer", Unread()))

    with pytest.raises(InvalidRequest, match=r"41 characters.* 10 tokens.* at most 40"):
        text.token_ids(prompt("x" * 41), max_tokens=10)
    with pytest.raises(AssertionError, match="tokenised"):
        text.token_ids(prompt("x" * 40), max_tokens=10)


@pytest.mark.parametrize(
    ("stop", "named"),
    [
        (["x"] * (MAX_STOP_STRINGS + 1), "stop has 65 strings; at most 64"),
        (["a", "x" * (MAX_STOP_CHARACTERS + 1)], "string of 1025 characters; at most 1024"),
    ],
)
def test_too_many_or_too_long_stop_strings_are_refused(stop: list[str], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check_request(_with_stop(stop), None)


def test_stop_strings_at_the_limits_are_accepted() -> None:
    stop = ["x" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS

    check_request(_with_stop([*stop, ""]), None)
    assert calls_from(_with_stop([*stop, ""]), "a")[0].stop.strings == tuple(stop)


def _with_stop(stop: list[str]) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text="import os", sampling=sampling_pb2.SamplingParams(stop=stop)
    )
