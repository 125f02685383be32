from __future__ import annotations

from baton.core.ids import AdapterRef, HandoffId, ModelVariant, PrefixKeys
from baton.core.sampling import SamplingParams
from baton.router.answer import AnswerAssembler
from baton.router.dispatch.attempt import DispatchedRequest
from baton.router.request_scope import RequestContext
from baton.router.values import GenerateCall, TokenPrompt


def test_nodes_get_the_adapter_of_the_model_that_the_request_resolved_to() -> None:
    model = ModelVariant("tiny", AdapterRef("adapter", "1"))
    call = GenerateCall("a", TokenPrompt((1, 2)), SamplingParams(), model=model, cache_salt="s")
    request = DispatchedRequest(call, RequestContext(0.0), AnswerAssembler())

    sent = request.to_engine_request(HandoffId("a", 1), 1.0, (), is_paced=False)

    assert sent.prefix_keys == PrefixKeys("s", "1")
