"""Router with a real gRPC server whose answers are scripted by a test."""

# ruff: noqa: N802  # gRPC names the methods

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from baton.rpc.channel import server_options
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

WAIT_S = 60.0


class ScriptedAnswer:
    """One request with a scripted answer."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.request = request
        self.was_cancelled = threading.Event()
        self._texts: queue.Queue[str | None] = queue.Queue()

    @property
    def turns(self) -> list[tuple[str, str]]:
        return [(turn.role, turn.content) for turn in self.request.chat.messages]

    def send_text(self, text: str) -> None:
        self._texts.put(text)

    def end(self) -> None:
        self._texts.put(None)

    def texts(self) -> Iterator[str]:
        return iter(self._texts.get, None)


class ScriptedRouter(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, answers: Sequence[str]) -> None:
        self.address = ""
        self._answers = list(answers)  # used first; then the test scripts each answer
        self._asked: queue.Queue[ScriptedAnswer] = queue.Queue()

    def next_request(self) -> ScriptedAnswer:
        return self._asked.get(timeout=WAIT_S)

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateResponse]:
        reported = ScriptedAnswer(request)
        has_ended = False

        def note_end() -> None:
            if not has_ended:
                reported.was_cancelled.set()
                reported.end()

        context.add_callback(note_end)
        if self._answers:
            reported.send_text(self._answers.pop(0))
            reported.end()
        self._asked.put(reported)
        for text in reported.texts():
            yield inference_pb2.GenerateResponse(request_id="1", text=text)
        has_ended = True
        finish = inference_pb2.Finish(reason=sampling_pb2.FINISH_REASON_STOP)
        yield inference_pb2.GenerateResponse(request_id="1", finish=finish)

    def Embed(self, request: Any, context: Any) -> inference_pb2.EmbedResponse:
        embeddings = [inference_pb2.Embedding(values=[1.0]) for _ in request.inputs]
        return inference_pb2.EmbedResponse(request_id="1", embeddings=embeddings)

    def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=request.text.encode())

    def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModel(self, request: Any, context: Any) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(model="told")


@contextmanager
def scripted_router(*answers: str) -> Iterator[ScriptedRouter]:
    router = ScriptedRouter(answers)
    with ThreadPoolExecutor() as threads:
        server = grpc.server(threads, options=server_options())
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
        router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield router
        finally:
            server.stop(grace=None).wait()
