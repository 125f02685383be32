"""Blocking client of a Baton router."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import grpc

from baton.client.generation import (
    DEFAULT_GENERATION,
    Answer,
    Chunk,
    Generation,
    Message,
    Model,
    Prompt,
    check_single,
    new_answers,
)
from baton.client.messages import (
    CHUNK,
    embed_request_from,
    embeddings_from,
    model_from,
    request_from,
    token_vectors_from,
    tokenize_request_from,
)
from baton.client.retries import DEFAULT_RETRIES, Access, Retries
from baton.core.vectors import Floats
from baton.interrupts import get_interruptibly
from baton.rpc.channel import open_blocking_channel
from baton.rpc.router_address import router_target
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.v1 import inference_pb2, inference_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")


class Client:
    """Blocking client of a router. Calls raise BatonError.

    `timeout_s` limits each call as a whole, including its retries.

    >>> with Client("127.0.0.1:50051") as client:
    ...     for chunk in client.stream("import os\\n"):
    ...         print(chunk.text, end="")
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        tls: TlsConfig = PLAIN,
        token: str | None = None,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        address = router_target(address)
        self._access = Access(address, timeout_s, tls, token, retries)
        self._channel = open_blocking_channel(address, tls)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def stream(
        self,
        prompt: Prompt,
        generation: Generation = DEFAULT_GENERATION,
        *,
        timeout_s: float | None = None,
    ) -> Generator[Chunk, None, None]:
        """Stream the chunks of the answer; with `n` above 1, those of all answers, interleaved.

        Leaving the loop, closing the generator or Ctrl-C cancels the request.
        """
        request = request_from(prompt, generation)
        tries = self._access.tries(timeout_s)
        while True:
            call = partial(
                self._stub.Generate,
                request,
                timeout=tries.remaining_s,
                metadata=(*self._access.metadata, *generation.metadata),
            )
            try:
                with closing(stream_interruptibly(call)) as responses:
                    for response in responses:
                        tries.is_begun = True
                        yield CHUNK.from_message(response)
                return
            except grpc.RpcError as error:
                pause_s = tries.failed(error)
            time.sleep(pause_s)

    def generate(
        self,
        prompt: Prompt,
        generation: Generation = DEFAULT_GENERATION,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        check_single(generation)
        return self.generate_all(prompt, generation, timeout_s=timeout_s)[0]

    def generate_all(
        self,
        prompt: Prompt,
        generation: Generation = DEFAULT_GENERATION,
        *,
        timeout_s: float | None = None,
    ) -> list[Answer]:
        """Return all `n` answers."""
        answers = new_answers(generation)
        for chunk in self.stream(prompt, generation, timeout_s=timeout_s):
            answers[chunk.index].take(chunk)
        return answers

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        model: str = "",
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> list[list[float]]:
        """Return the embedding of each text, or a classifier's scores, in order.

        `dimensions` keeps the first ones, for models that were trained for it. Longer texts than
        the model's context are refused, unless `truncate_prompt_tokens` cuts them.
        """
        request = embed_request_from(texts, model, dimensions, truncate_prompt_tokens, cache_salt)
        return embeddings_from(self._unary(self._stub.Embed, request, timeout_s=timeout_s))

    def embed_tokens(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        model: str = "",
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> list[Floats]:
        """Return a matrix for each text, in order, with a vector of each of its tokens.

        The arguments are those of `embed`.
        """
        request = embed_request_from(
            texts, model, dimensions, truncate_prompt_tokens, cache_salt, per_token=True
        )
        return token_vectors_from(self._unary(self._stub.Embed, request, timeout_s=timeout_s))

    def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> list[int]:
        """Return the token ids that Generate would use for a text or a chat."""
        request = tokenize_request_from(prompt, model)
        return list(self._unary(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Iterable[int], *, model: str = "") -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids, model=model)
        return self._unary(self._stub.Detokenize, request).text

    def model(self, name: str = "") -> Model:
        """Return a served model: without a name, the only one that generates."""
        request = inference_pb2.GetModelRequest(model=name)
        return model_from(self._unary(self._stub.GetModel, request))

    def _unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        timeout_s: float | None = None,  # None: that of the client
    ) -> Response:
        tries = self._access.tries(timeout_s)
        while True:
            try:
                return method(request, timeout=tries.remaining_s, metadata=self._access.metadata)
            except grpc.RpcError as error:
                pause_s = tries.failed(error)
            time.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class EndOfStream:
    error: Exception | None = None


def stream_interruptibly(start: Callable[[], Any]) -> Generator[Any, None, None]:
    """Yield the messages of a call that `start` begins. Raises RpcError.

    They are read on another thread, so that Ctrl-C never interrupts gRPC, which waits for messages
    on a condition. A KeyboardInterrupt raised inside that wait leaves its lock in an undefined
    state, and later calls fail or hang. One raised while a call starts leaks the call, and its
    channel never closes. Waiting on a SimpleQueue can be interrupted anywhere.

    The call is cancelled if the generator is closed early, also by a signal.
    """
    reader = _StreamReader(start)
    try:
        # Thread.start would itself wait on a condition. This thread is never joined.
        _thread.start_new_thread(reader.run, ())
        while not isinstance(message := get_interruptibly(reader.messages), EndOfStream):
            yield message
    finally:
        reader.close()
    if message.error is not None:
        raise message.error


class _StreamReader:
    """Thread that starts and reads one call: an interrupted start would leak the channel."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.messages: SimpleQueue[Any] = SimpleQueue()
        self._start = start
        self._call: Any = None
        self._is_closed = False

    def run(self) -> None:
        try:
            self._call = call = self._start()
            if self._is_closed:  # closed before there was a call to cancel
                call.cancel()
            for message in call:
                self.messages.put(message)
        except Exception as error:  # noqa: BLE001 - raised again by the consumer
            self.messages.put(EndOfStream(error))
        else:
            self.messages.put(EndOfStream())

    def close(self) -> None:
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
