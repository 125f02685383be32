"""Settings of an optional part of a node, as a field of `NodeOptions`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from baton.core.exclusions import Feature


class PartConfig(ABC):
    needs_token_ids = False  # in the events of the prefix cache

    @property
    @abstractmethod
    def feature(self) -> Feature: ...

    @property
    @abstractmethod
    def is_on(self) -> bool: ...

    def check_shared(self) -> None:
        """Raise InvalidConfig for settings that several nodes cannot share."""
        return
