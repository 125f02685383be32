"""Typed streaming clients of a Baton router, blocking and asyncio."""

from baton.client.async_client import AsyncClient
from baton.client.client import Client
from baton.client.generation import (
    Answer,
    Chunk,
    Generation,
    Message,
    Model,
    Prompt,
    Sampling,
)
from baton.client.retries import Access, BatonError, Retries
from baton.core.kv_hints import KvHints
from baton.core.output import Finish, Served
from baton.rpc.security.tls import TlsConfig

__all__ = [
    "Access",
    "Answer",
    "AsyncClient",
    "BatonError",
    "Chunk",
    "Client",
    "Finish",
    "Generation",
    "KvHints",
    "Message",
    "Model",
    "Prompt",
    "Retries",
    "Sampling",
    "Served",
    "TlsConfig",
]
