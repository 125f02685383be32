"""Attack on stored conversations: small requests that continue a large one, many at a time."""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from itertools import repeat
from typing import Any

from benchmarks.chaos.hostile.requests import HttpPost
from benchmarks.chaos.hostile.sending import Outcomes, post_all

RESPONSES = "/v1/responses"
# Reasoning of earlier turns, which chat templates leave out of the prompt.
TEXT = {"type": "reasoning_text", "text": "x" * 300}
UNSEEN_ITEM = {"type": "reasoning", "summary": [], "content": [TEXT]}
NUM_ITEMS = 4_000  # of a request, 1.6 MB: nearly as many values as a router takes
NUM_TURNS, NUM_FOLLOWERS = 8, 16


def attack_histories(address: str, model: str, end_s: float) -> Outcomes:
    """Let a conversation grow, and continue each of its responses by many requests at a time."""
    outcomes: Outcomes = Counter()
    history, previous = [UNSEEN_ITEM] * NUM_ITEMS, None
    for _ in range(NUM_TURNS):
        status, previous = _respond(address, _body(model, history, previous), end_s)
        outcomes[f"stored {status}"] += 1
        if previous is None:
            return outcomes
        follower = HttpPost(RESPONSES, _body(model, [], previous, store=False))
        outcomes += post_all(address, [*repeat(follower, NUM_FOLLOWERS)], end_s)
    return outcomes


def _body(model: str, history: list[Any], previous: str | None, *, store: bool = True) -> bytes:
    message = {"role": "user", "content": "the quick"}
    fields = {"model": model, "input": [*history, message], "max_output_tokens": 1, "store": store}
    return json.dumps(fields | ({"previous_response_id": previous} if previous else {})).encode()


def _respond(address: str, body: bytes, end_s: float) -> tuple[str, str | None]:
    """Return the status of a response, and the id that continues it."""
    connection = http.client.HTTPConnection(address, timeout=max(0.1, end_s - time.monotonic()))
    try:
        connection.request("POST", RESPONSES, body, {"content-type": "application/json"})
        response = connection.getresponse()
        content = json.loads(response.read())
        return f"{response.status}", content.get("id")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__, None
    finally:
        connection.close()
