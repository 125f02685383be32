"""gRPC servicer of `InferenceService`: converts messages to values and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from grpc import aio

from baton.core.ids import ModelVariant
from baton.core.legs import LegKind
from baton.core.request import EMBED
from baton.core.vectors import check_dimensions
from baton.router.answers import generate_answers
from baton.router.byte_budget import Lease
from baton.router.doors.grpc.translate import (
    ResponseBuilder,
    calls_from,
    check_chat,
    check_request,
    embed_calls_from,
    embedding_to,
    tokenize_input_from,
)
from baton.router.embeddings import embed_texts
from baton.router.fair_slots import turn_name
from baton.router.input_processing.limits import (
    MAX_TOKENS_TO_DETOKENIZE,
    check_count,
    check_name,
)
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScope, RequestScopes, host_of_peer
from baton.router.values import ChatPrompt, GenerateCall, TokenChunk
from baton.rpc.errors import NoNodes
from baton.rpc.messages.conversion import SAMPLING_DEFAULTS
from baton.rpc.node_info import NodeCard
from baton.rpc.status import named_errors
from baton.v1 import inference_pb2, inference_pb2_grpc


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, pipeline: Pipeline, scopes: RequestScopes) -> None:
        self._pipeline = pipeline
        self._table = pipeline.table
        self._scopes = scopes

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        request_id, scope = self._scopes.begin_call(request.request_id, context)
        async with named_errors(context, request_id=request_id, trace_id=scope.trace_id):
            with scope.ending_on_error():
                model = self._table.find_model(request.model)
                served = self._table.served_model(model)
                check_request(request, served.max_model_len)
                calls = calls_from(request, request_id, served.sampling_defaults, model)
                calls = await self._with_files(calls, scope, context)
            builders = [ResponseBuilder(request_id, index) for index in range(len(calls))]
            answers = generate_answers(self._pipeline, scope, calls, len(calls))
            with scope.within_limits():
                async with aclosing(answers) as parts:
                    async for index, part in parts:
                        if isinstance(part, TokenChunk) and part.prompt_logprobs:
                            yield await builders[index].build_in_slices(part)
                        else:
                            yield builders[index].next(part)

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: aio.ServicerContext[Any, Any]
    ) -> inference_pb2.EmbedResponse:
        request_id, scope = self._scopes.begin_call(request.request_id, context)
        async with named_errors(context, request_id=request_id, trace_id=scope.trace_id):
            with scope.ending_on_error():
                model = self._table.find_model(request.model, EMBED)
                calls = embed_calls_from(request, request_id, model)
                num_dimensions = request.dimensions if request.HasField("dimensions") else None
                if size := self._table.served_model(model).vector_size:
                    check_dimensions(num_dimensions, size)
            with scope.within_limits():
                hold = self._lease_during(context).add
                texts = await embed_texts(self._pipeline, scope, calls, hold)
        embeddings = [embedding_to(text, num_dimensions) for text in texts]
        name = model.name or next(iter(self._table.served.names), "")
        return inference_pb2.EmbedResponse(request_id=request_id, embeddings=embeddings, model=name)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: aio.ServicerContext[Any, Any]
    ) -> inference_pb2.TokenizeResponse:
        async with named_errors(context):
            with self._within_limits(context) as client:
                check_chat(request.chat)
                model = self._checked_model(request.model)
                prompt = tokenize_input_from(request)
                with self._pipeline.byte_budget.lease() as lease:
                    prompt = await self._pipeline.read_files(prompt, model, client, lease.add)
                token_ids = await self._pipeline.inputs.token_ids(prompt, model, client)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: aio.ServicerContext[Any, Any]
    ) -> inference_pb2.DetokenizeResponse:
        async with named_errors(context):
            with self._within_limits(context) as client:
                check_count("token_ids", len(request.token_ids), MAX_TOKENS_TO_DETOKENIZE)
                model = self._checked_model(request.model)
                text = await self._pipeline.inputs.text(tuple(request.token_ids), model, client)
        return inference_pb2.DetokenizeResponse(text=text)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: aio.ServicerContext[Any, Any]
    ) -> inference_pb2.GetModelResponse:
        async with named_errors(context):
            model = self._checked_model(request.model)
            served, card = self._table.served_model(model), self._card_of(model)
        return inference_pb2.GetModelResponse(
            model=model.name or card.model,
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            sampling_defaults=SAMPLING_DEFAULTS.to_message(card.sampling_defaults),
            max_sequence_len=served.max_sequence_len or 0,
            tasks=served.tasks,
        )

    async def _with_files(
        self, calls: list[GenerateCall], scope: RequestScope, context: Any
    ) -> list[GenerateCall]:
        """Return the calls, whose prompt is the same, with its files read.

        They count in the budget of bytes until the end of the client's call.
        """
        prompt = calls[0].prompt
        if not isinstance(prompt, ChatPrompt) or not prompt.files:
            return calls
        lease = self._lease_during(context)
        prompt = await self._pipeline.read_files(
            prompt, calls[0].model, scope.client, lease.add, scope.context.trace.image_work
        )
        return [replace(call, prompt=prompt) for call in calls]

    def _lease_during(self, context: Any) -> Lease:
        """Return a lease of bytes that the end of the client's call releases."""
        lease = Lease(self._pipeline.byte_budget)
        context.add_done_callback(lambda _: lease.release())
        return lease

    @contextmanager
    def _within_limits(self, context: aio.ServicerContext[Any, Any]) -> Iterator[str]:
        """Count a request that generates nothing, and yield its client. Raises RateLimited."""
        owner = self._scopes.owner_of(context.invocation_metadata() or ())
        with self._scopes.admitting(owner):
            yield turn_name(owner, host_of_peer(context.peer()))

    def _checked_model(self, name: str) -> ModelVariant:
        """Return a served model. Raises UnknownModel, and InvalidRequest if it must be named."""
        check_name("model", name)
        model = self._table.find_model(name)
        self._pipeline.inputs.check_model(model)
        return model

    def _card_of(self, model: ModelVariant) -> NodeCard:
        """Return the card of a node that ends requests of the model."""
        generates = self._table.served_model(model).generates
        for node in self._table.open_nodes(LegKind.DECODE if generates else LegKind.ENCODE):
            if node.card.model == model.base:
                return node.card
        raise NoNodes("no decode node is reachable, so the served model is unknown")
