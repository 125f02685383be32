"""Baton: prefill/decode-disaggregated LLM inference.

What people import is here; each name is loaded when it is first asked for, because every
room that speaks gRPC imports `baton.v1` and most of them must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.client import AsyncClient, BatonError, Client, Generation, Retries, TlsConfig
    from baton.completion import Completion
    from baton.llm import LLM
    from engine.sampling import SamplingParams
    from engine.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "AsyncClient",
    "BatonError",
    "Client",
    "Completion",
    "Generation",
    "Retries",
    "SamplingParams",
    "StructuredOutputs",
    "TlsConfig",
]

_HOMES = {
    "LLM": "baton.llm",
    "Completion": "baton.completion",
    "AsyncClient": "baton.client",
    "BatonError": "baton.client",
    "Client": "baton.client",
    "Generation": "baton.client",
    "Retries": "baton.client",
    "SamplingParams": "engine.sampling",
    "StructuredOutputs": "engine.structured_outputs",
    "TlsConfig": "serving.tls",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
