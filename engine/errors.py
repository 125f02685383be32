"""Exceptions of the engine."""

from __future__ import annotations

from baton.core.errors import NamedError


class EngineError(NamedError):
    """Base class of the engine's exceptions."""


class EngineStopped(EngineError):
    """The engine has ended and accepts no requests."""


class EngineKilled(EngineStopped):
    """The engine has ended since a process that it needs was killed, crashed or hangs."""


class EngineGone(EngineStopped):
    """The engine had ended before the request was submitted."""


class PassFailed(EngineError):
    """Every forward pass with this request fails; the engine continues without it."""


class PassHookFailed(EngineError):
    """The hook of a pass failed. No row is at fault: the engine ends with `root`."""

    def __init__(self, root: Exception) -> None:
        super().__init__(f"the hook of a pass failed: {root!r}")
        self.root = root


class RunnerLost(EngineError):
    """The runner can run no pass any more: the engine ends."""


class ProcessLost(RunnerLost):
    """Another process of the runner was killed, crashed or hangs."""


class PassSkipped(EngineError):
    """A pass was launched after one that then failed, and was not run."""


class FollowedPassFailed(EngineError):
    """A pass failed with `root` after the next one was launched, which may have overwritten states.

    The next pass reads the recurrent states that this one wrote, and writes those that it read.
    """

    def __init__(self, root: Exception) -> None:
        super().__init__(f"a pass failed after the next one was launched: {root!r}")
        self.root = root


class OutOfOrder(EngineError):
    """An operation was out of order, such as a plan made before the last one was updated."""


class RowOverflow(EngineError):
    """A plan assigns a request more blocks or tokens than its row in the runner's batch holds."""


class EncodingMissing(EngineError):
    """A pass needs rows of a picture's encoding that the runner does not have."""


class PictureCut(EngineError):
    """A pass would compute a part of a picture whose tokens attend to each other."""


class EncodingsUnaccounted(EngineError):
    """A consistency check found encodings of pictures that are not accounted for."""


class BlocksUnaccounted(EngineError):
    """A consistency check found a wrong reference count or request count."""
