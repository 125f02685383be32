"""Message size limits and the requests that fit into them."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import RequestId
from baton.core.output import Output, TokenLogprobs
from baton.core.sampling import MAX_LOGPROBS
from baton.router.input_processing.limits import TOKEN_BYTES, TOP_BYTES, check_prompt_logprobs_fit
from baton.rpc.messages.conversion import output_to
from baton.rpc.messages.limits import MAX_MESSAGE_BYTES

LARGEST_ID = 2**32 - 1
NUM_TOKENS = 20


@pytest.mark.parametrize("num_logprobs", [0, 1, 7, MAX_LOGPROBS])
def test_no_message_exceeds_the_estimated_size(num_logprobs: int) -> None:
    top = tuple((LARGEST_ID, -0.5) for _ in range(num_logprobs))
    reported = TokenLogprobs(LARGEST_ID, -0.5, LARGEST_ID, top)
    output = Output(RequestId("r"), 0, (LARGEST_ID,), prompt_logprobs=(reported,) * NUM_TOKENS)

    num_bytes = output_to(output).ByteSize()

    reckoned = NUM_TOKENS * (TOKEN_BYTES + TOP_BYTES * num_logprobs)
    assert reckoned / 2 < num_bytes <= reckoned


def test_a_refusal_states_the_largest_value_that_fits() -> None:
    num_tokens = 200_000

    with pytest.raises(InvalidRequest, match="ask for at most 17, or leave it out"):
        check_prompt_logprobs_fit(num_tokens, MAX_LOGPROBS)

    check_prompt_logprobs_fit(num_tokens, 17)
    with pytest.raises(InvalidRequest):
        check_prompt_logprobs_fit(num_tokens, 18)


def test_logprobs_of_long_prompts_fit_into_messages() -> None:
    check_prompt_logprobs_fit(50_000, MAX_LOGPROBS)
    check_prompt_logprobs_fit(MAX_MESSAGE_BYTES, None)
