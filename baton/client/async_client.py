"""Client of a Baton router for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc
from grpc import aio

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
from baton.client.retries import DEFAULT_RETRIES, Access, Retries, Tries
from baton.core.ids import AdapterRef
from baton.core.legs import LegKind, Legs
from baton.core.pause_mode import PauseMode
from baton.core.vectors import Floats
from baton.rpc.adapters import ADAPTER
from baton.rpc.channel import open_channel
from baton.rpc.messages.calls import KIND, PAUSE_MODE
from baton.rpc.node_info import STATUS, NodeStatus
from baton.rpc.router_address import router_target
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.telemetry.tracing.spans import Metadata
from baton.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc

CALL = "_AioCall"  # of gRPC; each call has a task that waits for its end
MAX_CALL_END_S = 0.2  # calls of other channels may not end

Request = TypeVar("Request")
Response = TypeVar("Response")
Item = TypeVar("Item")


class AsyncClient:
    """Client of a router for asyncio; see Client."""

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
        self._channel = open_channel(address, tls)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._has_cancelled_calls = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        if self._has_cancelled_calls:
            await _await_ends_of_calls()

    def stream(
        self,
        prompt: Prompt,
        generation: Generation = DEFAULT_GENERATION,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of the answer; with `n` above 1, those of all answers, interleaved.

        Leaving the loop cancels the request, unless a variable still refers to the generator:
        such a generator runs until its `aclose`, so use `contextlib.aclosing` for it.
        """
        return self._stream(
            self._stub.Generate,
            request_from(prompt, generation),
            CHUNK.from_message,
            self._access.tries(timeout_s),
            generation.metadata,
        )

    async def generate(
        self,
        prompt: Prompt,
        generation: Generation = DEFAULT_GENERATION,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        check_single(generation)
        return (await self.generate_all(prompt, generation, timeout_s=timeout_s))[0]

    async def generate_all(
        self,
        prompt: Prompt,
        generation: Generation = DEFAULT_GENERATION,
        *,
        timeout_s: float | None = None,
    ) -> list[Answer]:
        """Return all `n` answers."""
        answers = new_answers(generation)
        async for chunk in self.stream(prompt, generation, timeout_s=timeout_s):
            answers[chunk.index].take(chunk)
        return answers

    async def embed(
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
        return embeddings_from(await self._unary(self._stub.Embed, request, timeout_s=timeout_s))

    async def embed_tokens(
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
        return token_vectors_from(await self._unary(self._stub.Embed, request, timeout_s=timeout_s))

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> list[int]:
        """Return the token ids that Generate would use for a text or a chat."""
        request = tokenize_request_from(prompt, model)
        return list((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], *, model: str = "") -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids, model=model)
        return (await self._unary(self._stub.Detokenize, request)).text

    async def model(self, name: str = "") -> Model:
        """Return a served model: without a name, the only one that generates."""
        request = inference_pb2.GetModelRequest(model=name)
        return model_from(await self._unary(self._stub.GetModel, request))

    def nodes(self, interval_s: float = 0.0) -> AsyncGenerator[tuple[NodeStatus, ...], None]:
        """Yield the status of all nodes: once, or again after every interval if it is above 0."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        request = cluster_pb2.WatchNodesRequest(interval_s=interval_s)
        return self._stream(
            stub.WatchNodes,
            request,
            lambda response: tuple(map(STATUS.from_message, response.nodes)),
            self._access.tries(),
        )

    async def reset_prefix_caches(
        self,
        tiers: Sequence[str] = (),
        operator_token: str | None = None,
        *,
        reset_running: bool = False,
    ) -> dict[str, dict[str, int]]:
        """Clear these tiers (kv, host, file, object) of every node, or all.

        Return the number of KV blocks cleared, by node and tier. Tiers hold copies: while they are
        kept, prompts are loaded again. Files and objects are deleted for all hosts, which needs an
        operator's token. With `reset_running`, running requests compute their KV again.
        """
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        request = cluster_pb2.ResetPrefixCachesRequest(tiers=tiers, reset_running=reset_running)
        response = await self._unary(stub.ResetPrefixCaches, request, operator_token)
        return {node.node_id: dict(node.num_blocks_by_tier) for node in response.nodes}

    async def set_legs(
        self,
        node: str,
        legs: Sequence[LegKind],
        drain_timeout_s: float,
        operator_token: str | None = None,
    ) -> Legs:
        """Have a node offer these legs instead of others, and return all that it then offers.

        `node` is its name or address. Legs in progress may end for `drain_timeout_s`; then other
        nodes go on with them.
        """
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        request = cluster_pb2.ClusterServiceSetLegsRequest(
            node=node, legs=map(KIND.to_message, legs), drain_timeout_s=drain_timeout_s
        )
        response = await self._unary(stub.SetLegs, request, operator_token)
        return tuple(map(KIND.from_message, response.legs))

    async def set_pause(
        self, node: str, mode: PauseMode | None, operator_token: str | None = None
    ) -> None:
        """Pause the scheduler of a node, and return when it computes nothing; None: resume it."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        request = cluster_pb2.ClusterServiceSetPauseRequest(
            node=node, mode=PAUSE_MODE.to_message(mode)
        )
        await self._unary(stub.SetPause, request, operator_token)

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        model: str = "",
        can_replace: bool = False,
        operator_token: str | None = None,
    ) -> tuple[AdapterRef, int]:
        """Serve a LoRA adapter, and return it with the number of its nodes.

        `path` is its folder, relative to the nodes' --lora-root, and `model` the one that it
        adapts, where nodes of several serve adapters. If a node refuses, no node serves it.
        """
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        request = cluster_pb2.AddAdapterRequest(
            name=name, path=path, model=model, can_replace=can_replace
        )
        response = await self._unary(stub.AddAdapter, request, operator_token)
        return ADAPTER.from_message(response.adapter), response.num_nodes

    async def unload_adapter(self, name: str, operator_token: str | None = None) -> int:
        """Stop serving an adapter, and return how many nodes had it.

        Requests in progress keep it to their end.
        """
        stub = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        request = cluster_pb2.RemoveAdapterRequest(name=name)
        return (await self._unary(stub.RemoveAdapter, request, operator_token)).num_nodes

    async def _stream(
        self,
        method: aio.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        convert: Callable[[Response], Item],
        tries: Tries,
        metadata: Metadata = (),
    ) -> AsyncGenerator[Item, None]:
        while True:
            call = method(
                request,
                timeout=tries.remaining_s,
                metadata=(*self._access.metadata, *metadata),
            )
            try:
                async for response in call:
                    tries.is_begun = True
                    yield convert(response)
                return
            except grpc.RpcError as error:
                pause_s = tries.failed(error)
            finally:
                self._has_cancelled_calls |= call.cancel()
            await asyncio.sleep(pause_s)

    async def _unary(
        self,
        method: aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        token: str | None = None,  # instead of the client's own
        timeout_s: float | None = None,  # None: that of the client
    ) -> Response:
        access = self._access if token is None else replace(self._access, token=token)
        tries = access.tries(timeout_s)
        while True:
            try:
                return await method(request, timeout=tries.remaining_s, metadata=access.metadata)
            except grpc.RpcError as error:
                pause_s = tries.failed(error)
            await asyncio.sleep(pause_s)


async def _await_ends_of_calls() -> None:
    """Wait until gRPC has received the ends of cancelled calls.

    One that arrives when its event loop is closed makes the next loop report an exception.
    """
    watching = [task for task in asyncio.all_tasks() if CALL in repr(task)]
    if watching:
        await asyncio.wait(watching, timeout=MAX_CALL_END_S)
