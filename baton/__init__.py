"""Baton: prefill/decode-disaggregated LLM inference.

The public names are imported lazily, on first access: every package that uses gRPC imports
`baton.v1`, and most of them must not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.client import AsyncClient, BatonError, Client, Generation, Retries, TlsConfig
    from baton.completion import Completion
    from baton.core.errors import InvalidConfig, InvalidRequest, ModelError
    from baton.core.kv_hints import KvHints
    from baton.core.sampling import SamplingParams
    from baton.core.structured_outputs import StructuredOutputs
    from baton.llm import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "BatonError",
    "Client",
    "Completion",
    "Generation",
    "InvalidConfig",
    "InvalidRequest",
    "KvHints",
    "ModelError",
    "Retries",
    "SamplingParams",
    "StructuredOutputs",
    "TlsConfig",
]

_MODULES = {
    "LLM": "baton.llm",
    "Completion": "baton.completion",
    "AsyncClient": "baton.client",
    "BatonError": "baton.client",
    "Client": "baton.client",
    "Generation": "baton.client",
    "InvalidConfig": "baton.core.errors",
    "InvalidRequest": "baton.core.errors",
    "KvHints": "baton.core.kv_hints",
    "ModelError": "baton.core.errors",
    "Retries": "baton.client",
    "SamplingParams": "baton.core.sampling",
    "StructuredOutputs": "baton.core.structured_outputs",
    "TlsConfig": "baton.rpc.security.tls",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
