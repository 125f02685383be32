"""The engine's named errors. A message says what was wrong and what to do about it."""

from __future__ import annotations


class EngineError(Exception):
    """The root of every error that the engine raises on purpose."""


class InvalidRequest(EngineError):
    """The client's fault: this request alone is refused, the engine goes on."""

    def __init__(self, message: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.field = field  # the one that is wrong, where it is one


class InvalidConfig(EngineError):
    """A setting cannot work; the process stops at start."""


class ModelError(EngineError):
    """The model folder is missing, incomplete, corrupt or not supported."""


class NonFiniteLogits(EngineError):
    """The model produced NaN or infinite logits for one request."""


class EngineStopped(EngineError):
    """This engine takes no more requests."""


class EngineGone(EngineStopped):
    """The engine had stopped before the request came."""


class PassFailed(EngineError):
    """A forward pass fails whenever this request takes part; the engine goes on without it."""


class PassHookFailed(EngineError):
    """The hook of a pass failed, which is no fault of any row: the engine ends with `root`."""

    def __init__(self, root: Exception) -> None:
        super().__init__(f"the hook of a pass failed: {root!r}")
        self.root = root


class OutOfTurn(EngineError):
    """A step was not taken in order: every plan is updated once, before the next is made."""


class RowOverflow(EngineError):
    """A plan gave a request more blocks or tokens than its row in the runner's batch can hold."""


class BlocksUnaccounted(EngineError):
    """A check found a KV block held too often, too rarely, or by nobody."""
