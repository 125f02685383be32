"""Images in requests over gRPC count in the router's budget of bytes."""

from __future__ import annotations

import asyncio

import grpc
import pytest

pytest.importorskip("PIL", reason="baton[images] is not installed")

from grpc import aio

from baton.router.pictures.families.gemma3 import Gemma3Format
from baton.router.pictures.plan import Size
from baton.router.values import Prompt
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.support.image_files import image_file
from tests.support.node_calls import FakeNodeCalls
from tests.support.routers import PromptRecorder, a_router

PATIENCE_S = 60
EDGE = 56
IMAGE = image_file(300, 200)
NUM_BYTES = len(IMAGE) + 3 * EDGE * EDGE
CHAT = inference_pb2.Chat(
    messages=[inference_pb2.ChatMessage(role="user", content="who?", images=[IMAGE])]
)


class AnyPrompt(PromptRecorder):
    """Tokenization for which all prompts have the same tokens."""

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        return (3, 4)


def test_images_over_grpc_count_in_the_budget_of_bytes_until_the_call_ends() -> None:
    async def run() -> None:
        images_as, nodes = Gemma3Format(Size(EDGE, EDGE), 2, 2), FakeNodeCalls(is_endless=True)
        async with (
            a_router(node_calls=nodes, text=AnyPrompt(), images=images_as) as (router, address),
            aio.insecure_channel(address) as channel,
        ):
            budget = router.pipeline.byte_budget
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            sampling = sampling_pb2.SamplingParams(max_tokens=2)
            request = inference_pb2.GenerateRequest(chat=CHAT, sampling=sampling)

            call = stub.Generate(request)
            await call.read()
            assert budget.num_held == NUM_BYTES
            call.cancel()
            await router.ended.get()
            await stub.Tokenize(inference_pb2.TokenizeRequest(chat=CHAT))
            budget.max_bytes = NUM_BYTES - 1
            with pytest.raises(aio.AioRpcError, match="send this one later") as refused:
                async for _ in stub.Generate(request):
                    pass

        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert budget.num_held == 0

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
