"""Answers scrapes where the answer can be had without a race."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from telemetry.metrics import Read, Reading

LONGEST_WAIT_S = 1.0

Post = Callable[[Callable[[], None]], object]

log = logging.getLogger(__name__)


def asked_on(post: Post, read: Read) -> Read:
    """Reads on the thread that owns what is read; nothing if that has no time."""

    def ask() -> Reading:
        answer: Future[Reading] = Future()
        post(lambda: answer.set_result(read()))
        try:
            return answer.result(LONGEST_WAIT_S)
        except TimeoutError:
            log.warning("a scrape got only what was counted: nobody answered in time")
            return {}

    return ask
