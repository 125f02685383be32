"""Fields of config.json that describe transformers' model, read without importing its modules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError
from baton.engine.runner.families.read_config import read_dtype

PACKAGE = "transformers"
INSTALL = "pip install 'baton[transformers]'"
STATELESS_LAYERS = ("full_attention", "sliding_attention")
ADVICE = "choose a model of an architecture that Baton knows (docs/models.md)"


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Implements `Architecture`."""

    kernel_dtypes: ClassVar[Sequence[str]] = ("bfloat16",)  # for linear layers and attention

    architecture: str
    dtype: str
    fields: str  # config.json
    quantization: None = None
    can_generate: bool = True
    num_labels: int = 0


def find_architecture(checkpoint: Checkpoint) -> str | None:
    """Return the architecture that a folder names; None if it names none or several."""
    if not isinstance(checkpoint, SafetensorsFolder):
        return None
    names = checkpoint.read_config().get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return None
    return names[0]


def read_outline(checkpoint: Checkpoint) -> ModelOutline:
    """Read config.json. Raises ModelError for a model that it shows to be unsupported."""
    raw, architecture = checkpoint.read_config(), find_architecture(checkpoint)
    if architecture is None:
        raise raw.wrong("architectures", "must name one architecture")
    if find_spec(PACKAGE) is None:
        raise refuse(architecture, "the package transformers is not installed", INSTALL)
    for reason in _reasons(raw):
        raise refuse(architecture, reason)
    fields = {name: raw.get(name) for name in sorted(raw.names())}
    return ModelOutline(architecture, read_dtype(raw), json.dumps(fields))


def _reasons(raw: JsonFields) -> Iterator[str]:
    """Yield why the fields exclude a model."""
    if raw.flag("is_encoder_decoder", False) or raw.flag("add_cross_attention", False):
        yield "it attends to the states of an encoder, which the KV cache does not hold"
    if raw.has("text_config"):
        yield "it takes more than text"
    if raw.has("quantization_config"):
        yield "its weights are quantized"
    types = raw.get("layer_types")
    listed = types if isinstance(types, list) else []
    others = [each for each in listed if each not in STATELESS_LAYERS]
    if others:
        yield f"layers of the type {others[0]!r} keep a state that the KV cache does not hold"


class UnsupportedModel(Exception):
    """A model does what paged attention and the KV cache cannot. The text is the reason alone."""


def refuse(architecture: str, reason: object, advice: str = ADVICE) -> ModelError:
    """Return the error of a model that is refused."""
    return ModelError(
        f"{architecture} is not known to Baton itself, and cannot run on transformers' modules: "
        f"{reason}; {advice}"
    )
