"""The calls of a client request to embed texts: one for each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.core.errors import InvalidRequest
from baton.core.ids import ModelVariant
from baton.core.task import EMBED, UNSAMPLED, EmbedTask
from baton.router.input_processing.limits import check_count, check_texts
from baton.router.values import GenerateCall, Prompt

MAX_INPUTS = 2048  # as in OpenAI's API


def calls_for_texts(
    request_id: str,
    texts: Sequence[Prompt],
    model: ModelVariant,
    *,
    max_tokens: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    task: EmbedTask = EMBED,
) -> list[GenerateCall]:
    """Return a call for each text. All APIs create their calls here. Raises InvalidRequest.

    `max_tokens` cuts longer texts; None: they are refused if they exceed the context.
    """
    check_texts(model.name, cache_salt, (), ())
    check_count("input", len(texts), MAX_INPUTS)
    if not texts:
        raise InvalidRequest("input is empty: send at least one text", "input")
    if max_tokens is not None and max_tokens < 1:
        field = "truncate_prompt_tokens"
        raise InvalidRequest(f"{field} is {max_tokens}; it must be at least 1", field)
    call = GenerateCall(
        request_id,
        texts[0],
        UNSAMPLED,
        model=model,
        priority=priority,
        cache_salt=cache_salt,
        task=task,
        max_prompt_tokens=max_tokens,
    )
    if len(texts) == 1:
        return [call]
    return [
        replace(call, request_id=f"{request_id}-{index}", prompt=text)
        for index, text in enumerate(texts)
    ]
