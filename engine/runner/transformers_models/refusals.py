"""Refusals of models that transformers' modules cannot run here: reason and remedy."""

from __future__ import annotations

from baton.core.errors import ModelError

ADVICE = "choose a model of an architecture that Baton knows (docs/models.md)"


class UnsupportedModel(Exception):
    """A model does what paged attention and the KV cache cannot. The text is the reason alone."""


def refuse(architecture: str, reason: object, advice: str = ADVICE) -> ModelError:
    """Return the error of a model that is refused."""
    return ModelError(
        f"{architecture} is not known to Baton itself, and cannot run on transformers' modules: "
        f"{reason}; {advice}"
    )
