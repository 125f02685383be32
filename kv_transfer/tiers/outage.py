"""Outage of a store: a pause after each error of its reads, or of its writes."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

PAUSE_S = 10.0  # without writes, or reads, after one has failed


class Outage:
    """One kind of operation. An outage may last for days, so each cause of it is logged once."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        """`what` describes the operation, such as "stored in the file tier"."""
        self._what = what
        self._clock = clock
        self._cause = ""  # of the last error since the last success
        self._until_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """True if the last operation has succeeded, or there was none."""
        return not self._cause

    @property
    def is_paused(self) -> bool:
        return self._clock() < self._until_s

    def note_error(self, error: OSError) -> None:
        self._until_s = self._clock() + PAUSE_S
        if self._cause != str(error):
            self._cause = str(error)
            logger.warning("no KV is %s until it works: %s", self._what, error)

    def note_success(self) -> None:
        if self._cause:
            self._cause = ""
            logger.info("KV is %s again", self._what)
