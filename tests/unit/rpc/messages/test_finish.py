from __future__ import annotations

import pytest

from baton.core.output import Finish, FinishReason, Served
from baton.rpc.messages.conversion import finish_from, finish_to

LOCAL = Served("", "d0", False, "no prefill node", 0, 0, "", 5, 3, 2)
REMOTE = Served(
    "p0", "d0", True, "", 2048, 2, "nixl", 0, 16, 1, "00ff", 8, 6, 0, "block_size", {"host": 16}
)


@pytest.mark.parametrize("served", [LOCAL, REMOTE])
@pytest.mark.parametrize(
    "end",
    [
        {"reason": FinishReason.LENGTH, "warnings": ("lowered",)},
        {"reason": FinishReason.STOP, "stop_token_id": 0, "num_cached_prompt_tokens": 0},
        {"reason": FinishReason.STOP, "stop_string": "###"},
    ],
)
def test_the_end_of_an_answer_survives_its_message(served: Served, end: dict[str, object]) -> None:
    counts = {"num_prompt_tokens": 40, "num_completion_tokens": 7}
    times = {"dispatched_s": 0.1, "first_token_s": 0.2, "first_decoded_token_s": 0.0}
    finish = Finish(served=served, finished_s=0.5, **counts, **times, **end)  # type: ignore[arg-type]
    assert finish_from(finish_to(finish)) == finish
