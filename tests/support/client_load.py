"""Client load that runs while a test changes the cluster, and records the answers."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from baton.client import AsyncClient, BatonError, Finish, Generation

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClientRequest:
    prompt: tuple[int, ...]
    generation: Generation


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """Answer assembled from its chunks."""

    request: ClientRequest
    token_ids: tuple[int, ...]
    finish: Finish


async def stream_answer(client: AsyncClient, request: ClientRequest) -> ClientAnswer:
    """Stream one answer, and check that each token comes once and in order. Raises BatonError."""
    token_ids: list[int] = []
    finish: Finish | None = None
    async for chunk in client.stream(request.prompt, request.generation):
        assert finish is None, "a piece came after the last one"
        assert chunk.first_index == len(token_ids), "a token came twice, or was left out"
        token_ids += chunk.token_ids
        finish = chunk.finish
    assert finish is not None, "the stream ended without its end"
    return ClientAnswer(request, tuple(token_ids), finish)


def answer_all(
    address: str,
    requests: Sequence[ClientRequest],
    *,
    num_at_once: int | None = None,
    timeout_s: float = PATIENCE_S,
) -> list[ClientAnswer]:
    """Send all requests, at most `num_at_once` at the same time, and return their answers."""

    async def answer_each() -> list[ClientAnswer]:
        turns = asyncio.Semaphore(num_at_once or len(requests))
        async with AsyncClient(address, timeout_s=timeout_s) as client:

            async def answer(request: ClientRequest) -> ClientAnswer:
                async with turns:
                    return await stream_answer(client, request)

            return list(await asyncio.gather(*map(answer, requests)))

    return asyncio.run(answer_each())


class Load:
    """Clients that each send the next request a pause after the last one has ended."""

    def __init__(
        self,
        address: str,
        requests: Sequence[ClientRequest],
        num_clients: int,
        *,
        pause_s: float = 0.0,
    ) -> None:
        self._address = address
        self._requests = itertools.cycle(requests)
        self._num_clients = num_clients
        self._pause_s = pause_s
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self.answers: list[ClientAnswer] = []
        self.errors: list[Exception] = []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._thread.join()

    def until(self, is_so: Callable[[ClientAnswer], bool]) -> None:
        """Wait until a new answer satisfies the predicate, or one fails."""
        with self._changed:
            first = len(self.answers)

            def is_done() -> bool:
                return bool(self.errors) or any(
                    is_so(reported) for reported in self.answers[first:]
                )

            assert self._changed.wait_for(is_done, PATIENCE_S), "no such answer came"

    async def _run(self) -> None:
        async with AsyncClient(self._address, timeout_s=PATIENCE_S) as client:
            await asyncio.gather(*(self._send_on(client) for _ in range(self._num_clients)))

    async def _send_on(self, client: AsyncClient) -> None:
        while not self._is_over:
            try:
                self._note(await stream_answer(client, next(self._requests)))
            except (BatonError, AssertionError) as error:
                self._note(error)
                return
            await asyncio.sleep(self._pause_s)

    def _note(self, result: ClientAnswer | Exception) -> None:
        with self._changed:
            if isinstance(result, ClientAnswer):
                self.answers.append(result)
            else:
                self.errors.append(result)
            self._changed.notify_all()
