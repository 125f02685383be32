"""Conversion of what the sampling messages of SMG's services have in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.rpc.errors import UnsupportedInput

NUM_SEEDS = 1 << 64
# Constraints by the name of their field, with the field of StructuredOutputs.
CONSTRAINTS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}


def common_fields(message: Any) -> dict[str, Any]:
    """Return fields of SamplingParams. A number that is not set is 0 in these messages."""
    return {
        "top_p": message.top_p or 1.0,
        "top_k": max(0, message.top_k),
        "min_p": message.min_p,
        "frequency_penalty": message.frequency_penalty,
        "presence_penalty": message.presence_penalty,
        "repetition_penalty": message.repetition_penalty or 1.0,
        "stop_token_ids": tuple(message.stop_token_ids),
        "ignore_eos": message.ignore_eos,
        "structured_outputs": _structured_outputs(message),
    }


def _structured_outputs(message: Any) -> StructuredOutputs | None:
    name = message.WhichOneof("constraint")
    if name is None:
        return None
    if name == "choice":
        return StructuredOutputs(choice=tuple(message.choice.choices))
    constraint = getattr(message, name)
    if not constraint:
        raise InvalidRequest(f"{name} is empty: leave it out", name)
    return StructuredOutputs(**{CONSTRAINTS[name]: constraint})


def refuse_fields(message: Any, unsupported: Mapping[str, str]) -> None:
    """Raise UnsupportedInput if a field is set that is not supported; with what to do instead."""
    for descriptor, _ in message.ListFields():
        advice = unsupported.get(descriptor.name)
        if advice is not None:
            raise UnsupportedInput(f"{descriptor.name} is not supported here: {advice}")


def seed_from(seed: int) -> int:
    """Return the seed of a signed number."""
    return seed % NUM_SEEDS


def num_answers_of(message: Any, limit: int) -> int:
    """Return the number of answers; 0 stands for one. Raises InvalidRequest."""
    count: int = message.n or 1
    if count > limit:
        raise InvalidRequest(f"n is {count}; it must be from 1 to {limit}", "n")
    return count
