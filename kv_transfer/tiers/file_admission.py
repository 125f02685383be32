"""Admission of blocks to files: all of them, or those that are used again. Pure."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, BlockHints

MAX_NAMES = 1 << 17  # of blocks that were used once; the oldest ones are forgotten


class AdmissionPolicy(Enum):
    ALL = "all"
    REUSE = "reuse"  # at the second use, or at the first with a hint that there will be another


class FileAdmission:
    def __init__(
        self, policy: AdmissionPolicy = AdmissionPolicy.ALL, max_names: int = MAX_NAMES
    ) -> None:
        self._policy = policy
        self._max_names = max_names
        self._used_once: OrderedDict[BlockName, None] = OrderedDict()

    def admits_store(self, name: BlockName, hints: BlockHints) -> bool:
        """Return whether a block that was stored to host memory is written to a file, too."""
        if self._policy is AdmissionPolicy.ALL or hints.is_wanted or self.admits_use(name):
            return True
        self._used_once[name] = None
        if len(self._used_once) > self._max_names:
            self._used_once.popitem(last=False)
        return False

    def admits_use(self, name: BlockName, hints: BlockHints = NO_HINTS) -> bool:
        """Return whether a block that was not admitted when it was stored is written now.

        A release is no sign that it will be used again.
        """
        if hints.is_released or name not in self._used_once:
            return False
        del self._used_once[name]
        return True
