"""Clients of a Baton router: typed, streaming, blocking or asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import grpc
from grpc import aio

from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from engine.sampling import SamplingParams
from kv_transfer.types import TokenLogprobs
from serving.channel import CLIENT_OPTIONS
from serving.errors import ServiceError
from serving.status import remote_error
from serving.translate import logprobs_from, prompt_logprobs_from, sampling_to

Message = Mapping[str, str]  # role and content


class BatonError(ServiceError):
    """The router refused or failed a call."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{message} ({code.name}, {reason})" if reason else message)
        self.code = code
        self.reason = reason  # for programs: INVALID_REQUEST, NO_NODES and the like
        self.message = message
        self.retry_after_s = retry_after_s  # when the router told how long to wait


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate, beside the prompt."""

    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    request_id: str = ""
    model: str = ""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """Who did the work, and what passed between them."""

    prefill_node: str
    decode_node: str
    is_prefill_remote: bool
    prefill_reason: str
    kv_bytes: int
    kv_blocks: int
    kv_transport: str
    prompt_tokens_computed_on_decode: int
    prompt_tokens_cached_on_decode: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str  # stop or length
    stop_token_id: int | None
    stop_string: str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    dispatched_s: float
    first_token_s: float
    first_decoded_token_s: float
    finished_s: float
    served: Served


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer, in order."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    finish: Finish | None  # on the last


@dataclass(slots=True)
class Answer:
    """A whole answer."""

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, chunk: Chunk) -> None:
        self.request_id = chunk.request_id
        self.token_ids.extend(chunk.token_ids)
        self.text += chunk.text
        self.logprobs.extend(chunk.logprobs)
        self.prompt_logprobs.extend(chunk.prompt_logprobs)
        self.finish = chunk.finish or self.finish


# Text, a chat, or token ids.
Prompt = str | Sequence[int] | Sequence[Message]


class Client:
    """A blocking client. Raises BatonError.

    >>> with Client("127.0.0.1:50051") as client:
    ...     for chunk in client.stream("import os\\n"):
    ...         print(chunk.text, end="")
    """

    def __init__(self, address: str, *, timeout_s: float | None = None) -> None:
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._timeout_s = timeout_s

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def stream(
        self, prompt: Prompt, generation: Generation = Generation()
    ) -> Generator[Chunk, None, None]:
        """The answer as it comes. Closing the generator cancels the request."""
        call = self._stub.Generate(_request(prompt, generation), timeout=self._timeout_s)
        try:
            with _errors_named():
                for response in call:
                    yield _chunk(response)
        finally:
            call.cancel()

    def generate(self, prompt: Prompt, generation: Generation = Generation()) -> Answer:
        answer = Answer()
        for chunk in self.stream(prompt, generation):
            answer.take(chunk)
        return answer

    def tokenize(self, text: str) -> list[int]:
        with _errors_named():
            response = self._stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
        return list(response.token_ids)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        with _errors_named():
            request = inference_pb2.DetokenizeRequest(token_ids=token_ids)
            return self._stub.Detokenize(request).text

    def model(self) -> str:
        with _errors_named():
            return self._stub.GetModel(inference_pb2.GetModelRequest()).model


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, address: str, *, timeout_s: float | None = None) -> None:
        self._channel = aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def stream(
        self, prompt: Prompt, generation: Generation = Generation()
    ) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes. Closing the generator cancels the request."""
        call = self._stub.Generate(_request(prompt, generation), timeout=self._timeout_s)
        try:
            with _errors_named():
                async for response in call:
                    yield _chunk(response)
        finally:
            call.cancel()

    async def generate(self, prompt: Prompt, generation: Generation = Generation()) -> Answer:
        answer = Answer()
        async for chunk in self.stream(prompt, generation):
            answer.take(chunk)
        return answer


@contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        remote = remote_error(error)
        raise BatonError(
            remote.code, remote.reason or "", remote.message, remote.retry_after_s
        ) from error


def _request(prompt: Prompt, generation: Generation) -> inference_pb2.GenerateRequest:
    sampling = sampling_to(generation.sampling)
    sampling.stop.extend(generation.stop)
    sampling.include_stop_in_output = generation.include_stop_in_output
    request = inference_pb2.GenerateRequest(
        request_id=generation.request_id,
        model=generation.model,
        sampling=sampling,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
    )
    _set_prompt(request, prompt)
    return request


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [one for one in prompt if isinstance(one, Mapping)]
    if messages:
        turns = [inference_pb2.ChatMessage(**message) for message in messages]
        request.chat.CopyFrom(inference_pb2.Chat(messages=turns))
        return
    token_ids = [one for one in prompt if isinstance(one, int)]
    request.token_ids.CopyFrom(sampling_pb2.TokenIds(ids=token_ids))


def _chunk(response: inference_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        request_id=response.request_id,
        first_index=response.first_index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(logprobs_from(one) for one in response.logprobs),
        prompt_logprobs=prompt_logprobs_from(response.prompt_logprobs),
        finish=_finish(response.finish) if response.HasField("finish") else None,
    )


def _finish(message: inference_pb2.Finish) -> Finish:
    reason = sampling_pb2.FinishReason.Name(message.reason)
    timings = message.timings
    return Finish(
        reason=reason.removeprefix("FINISH_REASON_").lower(),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        num_prompt_tokens=message.usage.prompt_tokens,
        num_completion_tokens=message.usage.completion_tokens,
        dispatched_s=timings.dispatched_s,
        first_token_s=timings.first_token_s,
        first_decoded_token_s=timings.first_decoded_token_s,
        finished_s=timings.finished_s,
        served=_served(message.served),
    )


def _served(message: inference_pb2.Served) -> Served:
    return Served(
        prefill_node=message.prefill_node,
        decode_node=message.decode_node,
        is_prefill_remote=message.prefill == inference_pb2.PREFILL_PLACE_REMOTE,
        prefill_reason=message.prefill_reason,
        kv_bytes=message.kv_bytes,
        kv_blocks=message.kv_blocks,
        kv_transport=message.kv_transport,
        prompt_tokens_computed_on_decode=message.prompt_tokens_computed_on_decode,
        prompt_tokens_cached_on_decode=message.prompt_tokens_cached_on_decode,
        attempts=message.attempts,
    )
