"""Base class of all named errors, and the errors that every room raises. Imports no other room."""

from __future__ import annotations


class NamedError(Exception):
    """Base class of the errors that Baton raises on purpose.

    The message gives the cause and the remedy.
    """


class InvalidRequest(NamedError):
    """The request is invalid. It alone is rejected."""

    def __init__(self, message: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.field = field  # the invalid field, if it is a single one


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for an answer within the context length."""

    @classmethod
    def of_prompt(
        cls, num_prompt_tokens: int, max_model_len: int, field: str | None = None
    ) -> ContextLengthExceeded:
        # litellm and others recognise this error by the words "this model's maximum context
        # length is".
        return cls(
            f"the prompt has {num_prompt_tokens} tokens; this model's maximum context length is "
            f"{max_model_len} tokens (max_model_len), and at least one must be left for the "
            "answer: shorten the prompt",
            field,
        )

    @classmethod
    def of_text(
        cls, num_tokens: int, max_model_len: int, field: str | None = None
    ) -> ContextLengthExceeded:
        return cls(
            f"the text has {num_tokens} tokens; this model's maximum context length is "
            f"{max_model_len} tokens (max_model_len): shorten it, or set truncate_prompt_tokens",
            field,
        )


class InvalidConfig(NamedError):
    """A setting or an argument is invalid. A process that starts with it exits."""


class EmbeddingFailed(NamedError):
    """A text has no embedding: the model computed no finite numbers, or every pass failed."""


class ModelError(NamedError):
    """The model folder is missing, incomplete, corrupt or not supported."""


def require_setting(name: str, value: object, is_valid: bool, expected: str) -> None:
    """Raise InvalidConfig, which says what is expected, unless the setting is valid."""
    if not is_valid:
        raise InvalidConfig(f"{name} is {value}; it must be {expected}")
