"""Tokenization of large texts on threads: bounded, without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import pytest

from baton.checkpoint.tokenizer import Tokenizer
from baton.core.errors import InvalidRequest
from baton.router.doors.grpc.translate import calls_from, check_request
from baton.router.input_processing.large_texts import LargeTextConfig, LargeTexts
from baton.router.input_processing.limits import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from baton.router.input_processing.tokenization import ModelText
from baton.router.values import ChatMessage, ChatPrompt, Prompt, TextPrompt
from baton.rpc.errors import QueueFull
from baton.v1 import inference_pb2, sampling_pb2

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
